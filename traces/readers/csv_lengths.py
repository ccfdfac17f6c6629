"""CSV of lengths only: one request a row, no block ids.

A ``.csv`` file (also ``.xz``, ``.gz``, ``.bz2``) with a header. Columns are found by name, in any order:

- prompt tokens: ``prompt_tokens``, ``input_length``, ``ContextTokens`` (Azure's LLM inference traces) or ``Request
  tokens`` (BurstGPT);
- output tokens: ``output_tokens``, ``output_length``, ``GeneratedTokens`` or ``Response tokens``;
- optional: ``session_id``; ``start_s`` or ``Timestamp`` in seconds, or ``TIMESTAMP`` as ISO time;
  ``shared_tokens``, how many tokens of the session's previous prompt this one repeats.

How it is read: rows of one session are its turns, in the order of the file; without ``session_id`` each row is a
session of its own, named by its line. Rows without a time are one second apart. What a prompt shares cannot be seen
from lengths: without ``shared_tokens`` a prompt that is not shorter than the one before it in its session is taken
to repeat it all, a shorter one nothing. Block ids (64 tokens) are made accordingly, and this is noted once. A
theoretical rate of such a trace is an upper bound of what one session can hit, not a measurement.

Not supported: sharing between sessions, subagents, tools, stop reasons.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from traces.logs.fields import iso_seconds
from traces.model import MAIN_FLOW, BlockScope, Flow, ReadStats, Session, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import Document, Group, each_line, grouped_lines, line_documents
from traces.readers.ids import MAX_PROMPT_TOKENS, NO_IDS, FreshBlocks

BLOCK_SIZE = 64
_FILES = (".csv", ".csv.xz", ".csv.gz", ".csv.bz2")
_NAMES = {
    "prompt": ("prompt_tokens", "input_length", "contexttokens", "request tokens"),
    "output": ("output_tokens", "output_length", "generatedtokens", "response tokens"),
    "session": ("session_id",),
    "start": ("start_s", "timestamp"),
    "shared": ("shared_tokens",),
}


class _Row(NamedTuple):
    prompt: int
    output: int
    start: float | None
    shared: int | None


class _Columns(NamedTuple):
    """Position of each column, and of how many; None: the file has none of this meaning."""

    positions: dict[str, int]
    names: list[str]


def _matches(path: str) -> bool:
    return path.endswith(_FILES)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    lines = line_documents(path)
    header = next(lines, None)
    if header is None:
        raise TraceError("is empty; the first line must name the columns", file=path)
    columns = _columns(header)
    return reading.parsed(_groups(path, columns, reading.stats), partial(_session, columns=columns))


def _columns(header: Document) -> _Columns:
    names = _cells(header)
    lowered = [name.strip().lower() for name in names]
    positions = {}
    for meaning, known in _NAMES.items():
        at = next((lowered.index(name) for name in known if name in lowered), None)
        if at is not None:
            positions[meaning] = at
        elif meaning in ("prompt", "output"):
            message = f"no column of {meaning} tokens; name one of them {' or '.join(known)}"
            raise TraceError(message, file=header.source)
    return _Columns(positions, names)


def _cells(line: Document) -> list[str]:
    try:
        return next(csv.reader([line.raw.decode("utf-8-sig")]), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"is no line of CSV in UTF-8 ({error})", file=line.source) from error


def _groups(path: str, columns: _Columns, stats: ReadStats) -> Iterator[Group]:
    def key_of(line: Document) -> str | None:
        if "session" not in columns.positions:
            return line.source.rpartition(":")[2]
        try:
            cells = _cells(line)
        except TraceError:
            return None
        at = columns.positions["session"]
        return cells[at] if at < len(cells) and cells[at] else None

    if "shared" not in columns.positions:
        stats.notes.append(
            f"{path}: has no shared_tokens; a prompt is taken to repeat the one before it in its session"
        )
    return grouped_lines(path, each_line(key_of), header=True)


def _session(group: Group, columns: _Columns) -> Session:
    blocks = FreshBlocks(BLOCK_SIZE)
    turns: list[Turn] = []
    rows = [_row(line, columns, group.key) for line in group.lines]
    origin = rows[0].start or 0.0
    for index, row in enumerate(rows):
        before = turns[-1] if turns else None
        held = before.prompt_tokens if before else 0
        whole = held if row.prompt >= held else 0
        shared = min(held, row.prompt, whole if row.shared is None else row.shared)
        start = float(index) if row.start is None else row.start - origin
        if before and start < before.start_s:
            message = "was sent before its predecessor; rows of a session must be sorted by time"
            raise TraceError(message, file=group.lines[index].source, session=group.key, field=_name(columns, "start"))
        ids = blocks.ids(row.prompt, shared, before.block_ids if before else NO_IDS)
        turns.append(Turn(index, start, row.prompt, row.output, ids))
    main = Flow(MAIN_FLOW, tuple(turns))
    return Session(group.key, BLOCK_SIZE, BlockScope.SESSION, main, source=group.lines[0].source)


def _row(line: Document, columns: _Columns, session: str) -> _Row:
    cells = _cells(line)

    def fault(meaning: str, message: str) -> TraceError:
        return TraceError(message, file=line.source, session=session or None, field=_name(columns, meaning))

    if "session" in columns.positions and not session:
        raise fault("session", "is empty or missing; every row needs one")

    def text(meaning: str) -> str:
        at = columns.positions[meaning]
        if at >= len(cells):
            raise fault(meaning, f"is missing: the row has {len(cells)} cells, the header {len(columns.names)}")
        return cells[at].strip()

    def tokens(meaning: str, least: int) -> int:
        raw = text(meaning)
        try:
            number = int(raw) if len(raw) <= 20 else -1
        except ValueError:
            number = -1
        if not least <= number <= MAX_PROMPT_TOKENS:
            raise fault(meaning, f"'{raw[:50]}' is no number of tokens from {least} to {MAX_PROMPT_TOKENS}")
        return number

    start = None
    if "start" in columns.positions:
        raw = text("start")
        try:
            start = float(raw) if raw.replace(".", "", 1).isdecimal() else iso_seconds(raw)
        except (ValueError, OverflowError) as error:
            raise fault("start", f"'{raw[:50]}' is neither seconds nor an ISO-8601 time") from error
        if not 0 <= start < 1e12:
            raise fault("start", f"'{raw[:50]}' is out of range")
    shared = tokens("shared", 0) if "shared" in columns.positions else None
    return _Row(tokens("prompt", 1), tokens("output", 0), start, shared)


def _name(columns: _Columns, meaning: str) -> str:
    return columns.names[columns.positions[meaning]]


register(TraceFormat("csv", _matches, _read))
