"""Weka sessions as rows: JSON lines or Parquet (``traces.readers.weka_rows``). Holds what Weka files hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from traces.model import Session
from traces.readers.files import LINE_FILES
from traces.write import weka_document
from traces.writers.base import TraceWriter, Write, line_file, register
from traces.writers.weka import weka_loss

_PARQUET = ".parquet"


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    if path.suffix == _PARQUET:
        with _parquet(path) as write:
            yield write
        return
    with line_file(path) as line:
        yield lambda session: line(orjson.dumps(weka_document(session), option=orjson.OPT_SERIALIZE_NUMPY))


@contextmanager
def _parquet(path: Path) -> Iterator[Write]:
    import pyarrow as pa  # type: ignore[import-untyped]  # heavy, and needed for this alone
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    schema = _schema(pa)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:

        def write(session: Session) -> None:
            # A row group a session: it is what a reader has to hold at a time.
            writer.write_table(pa.Table.from_pylist([weka_document(session)], schema=schema))

        yield write


def _schema(pa: Any) -> Any:
    request = {
        "t": pa.float64(),
        "type": pa.string(),
        "model": pa.string(),
        "in": pa.int64(),
        "out": pa.int64(),
        "hash_ids": pa.list_(pa.int64()),
        "stop": pa.string(),
        "think_time": pa.float64(),
        "api_time": pa.float64(),
    }
    subagent = {
        "agent_id": pa.string(),
        "duration_ms": pa.int64(),
        "tool_tokens": pa.int64(),
        "system_tokens": pa.int64(),
        "requests": pa.list_(pa.struct(list(request.items()))),
    }
    return pa.schema(
        [
            ("id", pa.string()),
            ("models", pa.list_(pa.string())),
            ("block_size", pa.int64()),
            ("hash_id_scope", pa.string()),
            ("tool_tokens", pa.int64()),
            ("system_tokens", pa.int64()),
            ("requests", pa.list_(pa.struct([*request.items(), *subagent.items()]))),
        ]
    )


register(TraceWriter("weka-rows", (*LINE_FILES, _PARQUET), _open, weka_loss))
