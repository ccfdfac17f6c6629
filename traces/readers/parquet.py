"""Rows of Parquet files as JSON would hold them, but with arrays for lists of block ids. Knows no format.

Imported when a Parquet file is read: pyarrow takes longer to load than most traces to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from traces.model import TraceError
from traces.readers.files import files_of

PARQUET_FILES = (".parquet",)
# What pyarrow raises for a damaged file: its own errors, and what its parts let through.
_ERRORS = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, OverflowError, MemoryError)


def parquet_rows(path: Path, wanted: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The wanted columns of a file's rows, or those of a directory's files, and where each row is; one in memory.

    Args:
        path: a Parquet file or a directory of them.
        wanted: names of columns; those that a file has not are left out. A column ``requests`` of JSON text is parsed,
            and integers of ``hash_ids`` come as int64 arrays.

    Raises:
        TraceError: a file is damaged or no Parquet; names the row.
    """
    for file in files_of(path, PARQUET_FILES):
        row = 0
        try:
            with pq.ParquetFile(file) as table:
                columns = [name for name in wanted if name in table.schema_arrow.names]
                for batch in table.iter_batches(batch_size=1, columns=columns, use_threads=False):
                    for entry in _objects(batch.to_struct_array()):
                        row += 1
                        yield entry, f"{file}(row {row})"
        except _ERRORS as error:
            if isinstance(error, TraceError):
                raise
            reason = " ".join(str(error).split())
            message = f"row {row + 1} cannot be read ({reason}); the file is damaged or no Parquet, get it again"
            raise TraceError(message, file=str(file)) from error


def _objects(structs: Any) -> list[dict[str, Any]]:
    """A struct array as objects without its nulls: a field that an entry has not is null in Parquet."""
    objects: list[dict[str, Any]] = [{} for _ in range(len(structs))]
    for field, values in zip(structs.type, structs.flatten(), strict=True):
        for entry, value in zip(objects, _values(field.name, values), strict=True):
            if value is not None:
                entry[field.name] = value
    return objects


def _values(name: str, array: Any) -> list[Any]:
    if name == "requests" and (pa.types.is_string(array.type) or pa.types.is_large_string(array.type)):
        return [None if text is None else _json(text) for text in array.to_pylist()]
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        plain: list[Any] = array.to_pylist()
        return plain
    inner = array.type.value_type
    if name == "requests" and pa.types.is_struct(inner):
        return [None if part is None else _objects(part) for part in _parts(array)]
    if name == "hash_ids" and pa.types.is_integer(inner):
        return [None if part is None else _integers(part) for part in _parts(array)]
    lists: list[Any] = array.to_pylist()
    return lists


def _json(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text  # no list: the schema says so, with the name of the field


def _parts(array: Any) -> Iterator[Any]:
    """The list of each row as an array; None for null."""
    offsets = array.offsets.to_pylist()
    valid = array.is_valid().to_pylist()
    for at, known in enumerate(valid):
        yield array.values.slice(offsets[at], offsets[at + 1] - offsets[at]) if known else None


def _integers(part: Any) -> Any:
    if part.null_count:
        return part.to_pylist()  # a null is no id: the check says so
    return np.ascontiguousarray(part.cast(pa.int64()).to_numpy(zero_copy_only=False))
