"""What is wrong with a file of settings, in words that name file, option and field, and say what to do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], file: str, origins: Mapping[str, str]) -> str:
    """One line a problem.

    Args:
        model: what the file was read as.
        origins: by dotted field, the option that gave its value in place of the file.
    """
    lines = []
    for problem in error.errors():
        loc = tuple(str(part) for part in problem["loc"])
        field = ".".join(loc)
        where = f"{file}, {origins[field]}" if field in origins else file
        if field:
            where += f", field '{field}'"
        lines.append(f"{where}: {_remedy(problem['type'], problem['msg'], model, loc, problem.get('input'))}")
    return "\n".join(lines)


def _remedy(kind: str, message: str, model: type[BaseModel], loc: tuple[str, ...], value: Any) -> str:
    if kind == "extra_forbidden":
        known = _fields_at(model, loc[:-1])
        near = difflib.get_close_matches(loc[-1], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
        return f"unknown field; {hint}"
    if kind == "missing":
        return "is missing; add it to the recipe or pass it with --set"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}; got {value!r}"


def _fields_at(model: type[BaseModel], loc: tuple[str, ...]) -> list[str]:
    for part in loc:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
