"""What log readers share: lines with their numbers, typed access to foreign JSON, errors that name file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from eval.diagnose.chat import Call

_LONGEST_LINE = 256 * 2**20  # bytes


class LogError(ValueError):
    """A log, or a line of it, that cannot be read. The message names the file, the line and what to do."""


class Line(NamedTuple):
    """One JSON object of a log."""

    where: str  # FILE:LINE
    value: dict[str, Any]


Skip = Callable[[str], None]


class LogFormat(NamedTuple):
    """One kind of log.

    Attributes:
        name: as ``--format`` takes it.
        fits: whether a line can be of this format; asked of the first object of a file.
        read: lines in order to calls in order; a faulty line goes to ``skip`` with its reason.
    """

    name: str
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[Iterator[Line], Skip], Iterator[Call]]


def read_lines(path: Path, skip: Skip) -> Iterator[Line]:
    """The objects of a file with one JSON object a line; text before the first brace (a logger's time) is passed over.

    Raises:
        LogError: the file cannot be read, or a line is longer than 256 MiB.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(_LONGEST_LINE + 1):
                number += 1
                where = f"{path}:{number}"
                if len(raw) > _LONGEST_LINE:
                    raise LogError(f"{where}: a line of more than 256 MiB; is this a log with one request a line?")
                if not raw.strip():
                    continue
                brace = raw.find(b"{")
                try:
                    value = orjson.loads(raw[max(0, brace) :])
                except orjson.JSONDecodeError as error:
                    # A server's log has other lines too; only what looks like an object is a damaged one.
                    skip(f"{where}: not a JSON object ({error})")
                    continue
                if isinstance(value, dict):
                    yield Line(where, value)
                else:
                    skip(f"{where}: a JSON object was expected, not {type(value).__name__}")
    except OSError as error:
        raise LogError(f"{path}: cannot be read ({error.strerror}); pass a JSONL file") from None


def field(value: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """``value[name]``, or None where it is missing or null. Raises LogError for another type, naming the field."""
    found = value.get(name)
    if found is None:
        return None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise LogError(f"field {name!r} is {type(found).__name__}")
    return found


def count(value: dict[str, Any], name: str) -> int:
    """A number of tokens; missing is 0."""
    found = field(value, name, int)
    return max(0, found or 0)


def seconds(value: Any) -> float | None:
    """Seconds since 1970 of a number (seconds or milliseconds) or an ISO 8601 text; None for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) / 1000 if value > 1e11 else float(value)
    if isinstance(value, str):
        try:
            return datetime.fromisoformat(value.replace("Z", "+00:00")).timestamp()
        except ValueError:
            return None
    return None
