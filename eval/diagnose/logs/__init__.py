"""Chat logs as a stream of ``Call``: one file a format, each registered here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from eval.diagnose.chat import Call
from eval.diagnose.logs import claude_code, codex, requests
from eval.diagnose.logs.base import LogError, LogFormat, Skip, read_lines

__all__ = ["FORMATS", "LogError", "LogFormat", "files_of", "read_log"]

# Asked in order: the first that fits reads the file.
FORMATS: tuple[LogFormat, ...] = (claude_code.FORMAT, codex.FORMAT, requests.FORMAT)


def files_of(path: Path) -> list[Path]:
    """A file is itself; a directory is all ``.jsonl`` files below it, by name. Raises LogError for one without any."""
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*.jsonl"))
    if not found:
        raise LogError(f"{path}: no .jsonl file in it or below")
    return found


def read_log(path: Path, skip: Skip, name: str | None = None) -> Iterator[Call]:
    """The calls of a log, in order; one line is in memory at a time, and what its format has to keep.

    Args:
        path: a file with one JSON object a line.
        skip: is told of each line that is passed over, as ``FILE:LINE: reason``.
        name: a format's name; None: as the first object looks.

    Raises:
        LogError: no such file, nothing readable in it, or no format fits.
    """
    lines = read_lines(path, skip)
    first = next(lines, None)
    if first is None:
        raise LogError(f"{path}: no JSON object in it; pass a JSONL log")
    fitting = [f for f in FORMATS if (f.name == name if name else f.fits(first.value))]
    if not fitting:
        names = ", ".join(f.name for f in FORMATS)
        raise LogError(f"{first.where}: no known kind of log; pass --format ({names}) if it is one of them")
    yield from fitting[0].read(itertools.chain([first], lines), skip)
