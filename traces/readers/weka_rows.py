"""Weka sessions as rows of a table: JSON lines or Parquet, as data hubs hold them.

A row is one session with the fields of ``traces.readers.weka``: a line of a ``.jsonl`` file (also ``.xz``, ``.gz``,
``.bz2``), or a row of a ``.parquet`` file with the columns ``id, block_size, hash_id_scope, tool_tokens,
system_tokens, requests``. In Parquet an entry of ``requests`` is a struct with the fields of requests and of
subagents together, null where an entry has none, or ``requests`` is a column of JSON text. Field definitions:
kv-cache-tester's ``docs/trace_replay_tester.md`` and AIPerf's ``dataset/loader/weka_trace_models.py``, which reads
the rows of the ``cc-traces-weka`` collections. Such collections round the number of ids up; the id of a partial
block is dropped.

Not supported: what ``traces.readers.weka`` does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from traces.model import Session
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import LINE_FILES, first_object, line_documents
from traces.readers.weka import build_session, parse_session

_COLUMNS = ("id", "block_size", "hash_id_scope", "tool_tokens", "system_tokens", "requests")
_PARQUET = (".parquet",)


def _matches(path: str) -> bool:
    if Path(path).is_dir():
        return next(Path(path).rglob("*.parquet"), None) is not None
    return path.endswith(_PARQUET) or (path.endswith(LINE_FILES) and "requests" in (first_object(path) or {}))


def _read(path: str, reading: Reading) -> Iterator[Session]:
    if path.endswith(_PARQUET) or Path(path).is_dir():
        from traces.readers.parquet import parquet_rows  # pyarrow is heavy

        return reading.parsed(parquet_rows(Path(path), _COLUMNS), lambda row: build_session(*row, reading.stats))
    return reading.parsed(line_documents(path), partial(parse_session, stats=reading.stats))


register(TraceFormat("weka-rows", _matches, _read))
