"""What log readers share: lines with their numbers, errors that name file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from eval.diagnose.chat import Call
from traces.logs.fields import FieldError

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


def faulty(where: str, error: FieldError) -> str:
    """A record that cannot be used, as ``skip`` is told of it."""
    return f"{where}: field '{error.field}' {error}"
