"""Field types that formats share, and pydantic's complaints told as trace errors."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from traces.model import TraceError
from traces.readers.ids import MAX_PROMPT_TOKENS

# Bounds keep sums and arrays within 64 bits and within memory; no model and no recording comes near them.
PromptTokens = Annotated[int, Field(ge=1, le=MAX_PROMPT_TOKENS)]
OutputTokens = Annotated[int, Field(ge=0, le=MAX_PROMPT_TOKENS)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]

Model = TypeVar("Model", bound=BaseModel)


def validated(
    model: type[Model],
    raw: dict[str, Any],
    source: str,
    *,
    session: str | None = None,
    turn: int | None = None,
    ignored: Counter[str] | None = None,
) -> Model:
    """The object as ``model``; fields that the model does not have are counted in ``ignored``.

    Raises:
        TraceError: a field is missing or has a wrong value; names source and field.
    """
    try:
        parsed = model.model_validate(raw)
    except ValidationError as error:
        message, field = complaint(error)
        raise TraceError(message, file=source, session=session, turn=turn, field=field) from error
    if ignored is not None:
        count_ignored(model, raw, ignored)
    return parsed


def count_ignored(model: type[BaseModel], raw: dict[str, Any], ignored: Counter[str]) -> None:
    """Count fields of an object that ``model`` does not read."""
    known = _known(model)
    for name in raw:
        if name not in known:
            ignored[name[:100]] += 1


@functools.cache
def _known(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(info.alias or name for name, info in model.model_fields.items())


def complaint(error: ValidationError) -> tuple[str, str | None]:
    """pydantic's first complaint: what is wrong, and the path of the field (None: the object itself)."""
    first = error.errors(include_url=False, include_input=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:], path or None
