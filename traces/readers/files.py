"""Bytes of trace files: decompression, lines, members of archives, grouping of interleaved lines. Knows no format.

Nothing is read without a bound: one document (a session's JSON, or a line) may have ``MAX_DOCUMENT_BYTES`` after
decompression, so that a damaged or hostile archive cannot fill the memory.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import orjson

from traces.model import TraceError

MAX_DOCUMENT_BYTES = 1 << 30

LINE_FILES = (".jsonl", ".jsonl.xz", ".jsonl.gz", ".jsonl.bz2")


class Document(NamedTuple):
    """One session, or one line of a file, not parsed yet."""

    source: str  # file, and member or line, for error messages
    raw: bytes


def open_stream(path: Path) -> BinaryIO:
    """Open a file for reading bytes, decompressed if its name says xz, gzip or bzip2."""
    opener = _DECOMPRESSORS.get(path.suffix)
    return path.open("rb") if opener is None else cast(BinaryIO, opener(path, "rb"))


_DECOMPRESSORS: dict[str, Callable[..., object]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
}

# What reading a damaged or truncated container raises. tarfile lets a ValueError of its number fields through.
CONTAINER_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError, ValueError, OverflowError)


def container_fault(path: str | Path, error: Exception) -> TraceError:
    return TraceError(f"cannot be read ({error}); the file is truncated or damaged, get it again", file=str(path))


def read_file(path: Path) -> Document:
    """A whole file as one document.

    Raises:
        TraceError: it is damaged, or larger than ``MAX_DOCUMENT_BYTES``.
    """
    try:
        with open_stream(path) as stream:
            return Document(str(path), read_bounded(stream, str(path)))
    except CONTAINER_ERRORS as error:
        raise own_or_container_fault(path, error) from error


def read_bounded(stream: Any, source: str) -> bytes:
    raw: bytes = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise _too_long(source)
    return raw


def own_or_container_fault(path: str | Path, error: Exception) -> TraceError:
    """The error itself if it is ours (a TraceError is a ValueError too), else what the container said."""
    return error if isinstance(error, TraceError) else container_fault(path, error)


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of every line that is not blank."""
    number = 0
    try:
        with open_stream(Path(path)) as stream:
            while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise _too_long(line_source(path, number))
                if line.strip():
                    yield number, line
    except CONTAINER_ERRORS as error:
        raise own_or_container_fault(path, error) from error


def line_source(path: str | Path, number: int) -> str:
    """How a line is named in messages: editors and terminals open ``file:line``."""
    return f"{path}:{number}"


def line_documents(path: str | Path) -> Iterator[Document]:
    for number, line in read_lines(path):
        yield Document(line_source(path, number), line)


def parse_object(document: Document, what: str = "line") -> dict[str, Any]:
    """A JSON object.

    Raises:
        TraceError: it is no JSON, or JSON of another type.
    """
    try:
        value = orjson.loads(document.raw)
    except orjson.JSONDecodeError as error:
        message = f"not valid JSON ({error}); the {what} is truncated or damaged, restore it or skip it (--skip-bad)"
        raise TraceError(message, file=document.source) from error
    if not isinstance(value, dict):
        raise TraceError(f"must be a JSON object, not {_type_name(value)}", file=document.source)
    return value


def first_object(path: str) -> dict[str, Any] | None:
    """The first line of a file of lines as a JSON object, to recognise formats by; None if it is none."""
    try:
        _, line = next(read_lines(path), (0, b""))
        value = orjson.loads(line)
    except (TraceError, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def files_of(path: Path, endings: tuple[str, ...]) -> list[Path]:
    """The file itself, or the files of a directory (searched recursively) whose names end so, in order of names.

    Raises:
        TraceError: a directory without any.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.name.endswith(endings) and file.is_file())
    if not files:
        raise TraceError(f"no {endings[0]} file in this directory; give the folder of the sessions", file=str(path))
    return files


class Group(NamedTuple):
    """Lines of one session, in the order of the file."""

    key: str
    lines: list[Document]


Keys = Callable[[Iterator[Document]], list[str | None]]


def each_line(key_of: Callable[[Document], str | None]) -> Keys:
    """Keys of lines that each say for themselves to which session they belong."""
    return lambda lines: [key_of(line) for line in lines]


def grouped_lines(path: str, keys_of: Keys, *, header: bool = False) -> Iterator[Group]:
    """Sessions whose lines are mixed with those of others, each given out when its last line was read.

    The file is read twice, first for the keys alone, so that memory holds the keys and the lines of sessions that
    are still open, not the file.

    Args:
        path: file of lines.
        keys_of: the key of every line. A line without one (None) is a group of its own, with an empty key.
        header: the first line is no record.
    """

    def records() -> Iterator[Document]:
        lines = line_documents(path)
        if header:
            next(lines, None)
        return lines

    keys = keys_of(records())
    left = Counter(keys)
    open_groups: dict[str, list[Document]] = {}
    for key, document in zip(keys, records(), strict=True):
        if key is None:
            yield Group("", [document])
            continue
        lines = open_groups.setdefault(key, [])
        lines.append(document)
        left[key] -= 1
        if not left[key]:
            yield Group(key, open_groups.pop(key))


def _too_long(source: str) -> TraceError:
    size = MAX_DOCUMENT_BYTES >> 20
    return TraceError(f"more than {size} MiB in one document; split it into one session a document", file=source)


def _type_name(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
