"""What a trace format is, and the one way to open a trace: ``open_trace``.

A format is one file in this folder that registers a ``TraceFormat``. Its module docstring says what the format
looks like and what is not supported. Formats read; they know nothing of caches, servers or token ids.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np

from radix_cache.theory import common_blocks
from traces.model import BlockIds, ReadStats, Session, TraceError


class Document(NamedTuple):
    """One session as found in a file, not parsed yet."""

    source: str  # file, and member or line, for error messages
    raw: bytes


@dataclass(slots=True)
class Reading:
    """One pass over a trace: what to do with faulty sessions, and where to count."""

    stats: ReadStats
    skip_bad: bool = False

    def parsed(self, documents: Iterator[Document], parse: Callable[[Document], Session]) -> Iterator[Session]:
        """Parse one document at a time; a faulty one raises TraceError, or is counted with ``skip_bad``."""
        while True:
            try:
                document = next(documents, None)
                if document is None:
                    return
                session = parse(document)
            except TraceError as error:
                self.fault(error)
            else:
                yield session

    def fault(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.stats.skipped_sessions += 1
        self.stats.skipped.append(str(error))


class TraceFormat(NamedTuple):
    """A way to read traces."""

    name: str  # what --format takes
    matches: Callable[[str], bool]  # is this path of the format? By name and first bytes, cheaply
    read: Callable[[str, Reading], Iterator[Session]]  # stream the sessions; raise TraceError on faults


_formats: dict[str, TraceFormat] = {}


def register(trace_format: TraceFormat) -> None:
    """Make a format known; the order of registration is the order of recognition."""
    _formats[trace_format.name] = trace_format


def format_names() -> list[str]:
    return list(_formats)


def resolve_format(path: str, name: str | None = None) -> TraceFormat:
    """The format called ``name``, or the one that recognises the path.

    Raises:
        TraceError: unknown name, no such path, or no format recognises it.
    """
    if name is not None and name not in _formats:
        raise TraceError(f"unknown format '{name}'; known are {', '.join(_formats)}", file=path)
    generated = _formats.get("generated")
    is_generated = generated is not None and generated.matches(path)
    if not is_generated and not Path(path).exists():
        raise TraceError("no such file or directory; check the path", file=path)
    if name is not None:
        return _formats[name]
    for candidate in _formats.values():
        if candidate.matches(path):
            return candidate
    raise TraceError(f"format not recognised; name one of {', '.join(_formats)} (--format)", file=path)


def open_trace(
    path: str,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    stats: ReadStats | None = None,
    limit: int | None = None,
) -> Iterator[Session]:
    """Stream the sessions of a trace, one in memory at a time, each validated.

    Args:
        path: a file, directory or archive, or ``generated:sessions=20,seed=1`` (``traces.generate``).
        format: name of the format; recognised by name and content when None.
        skip_bad: pass over faulty sessions, counting them and keeping their messages in ``stats``.
        stats: filled while the sessions stream past.
        limit: stop after this many sessions.

    Raises:
        TraceError: at once if the path cannot be read; while iterating for a faulty session.
    """
    reading = Reading(ReadStats() if stats is None else stats, skip_bad)
    sessions = resolve_format(path, format).read(path, reading)
    return _counted(path, sessions, reading, limit)


def _counted(path: str, sessions: Iterator[Session], reading: Reading, limit: int | None) -> Iterator[Session]:
    seen: set[str] = set()
    while limit is None or reading.stats.sessions < limit:
        session = next(sessions, None)
        if session is None:
            return
        if session.id in seen:
            source = session.source or path
            message = "this id was already read from the same trace; give sessions unique ids"
            reading.fault(TraceError(message, file=source, session=session.id, field="id"))
            continue
        seen.add(session.id)
        reading.stats.sessions += 1
        reading.stats.requests += session.request_count
        reading.stats.prompt_tokens += sum(t.prompt_tokens for f in session.flows() for t in f.turns)
        yield session


@dataclass(slots=True)
class ChainCheck:
    """Checks that every id always follows the same id: only then does an id stand for its whole prefix."""

    _parents: dict[int, int] = field(default_factory=dict)

    def fault(self, ids: BlockIds, checked: BlockIds) -> str | None:
        """What is wrong with a prompt's ids, or None. ``checked`` are ids of an earlier, correct prompt.

        Ids that a prompt has in common with ``checked`` need no second look, which makes the usual
        case (a turn that appends) cheap.
        """
        if len(ids) and int(ids.min()) < 0:
            return f"block id {int(ids.min())} is negative"
        start = common_blocks(ids, checked)
        parent = int(ids[start - 1]) if start else -1
        for at, block in enumerate(ids[start:].tolist(), start):
            known = self._parents.setdefault(block, parent)
            if known != parent:
                return (
                    f"ids out of order: block {at} has id {block} after {_name(parent)}, which earlier came after "
                    f"{_name(known)}; ids must name their whole prefix (chained)"
                )
            parent = block
        return None


def _name(block: int) -> str:
    return "the start of the prompt" if block < 0 else f"id {block}"


def block_ids(raw: object) -> BlockIds | None:
    """A JSON list of integers as an int64 array; None if it is anything else."""
    if not isinstance(raw, list):
        return None
    try:
        # array() is three times as fast as numpy on lists of ints, and takes nothing but integers.
        return np.frombuffer(array("q", raw), dtype=np.int64) if raw else np.empty(0, dtype=np.int64)
    except (TypeError, OverflowError):
        return None


def full_blocks(ids: BlockIds, prompt_tokens: int, block_size: int) -> tuple[BlockIds, bool] | None:
    """Ids of the full blocks, and whether an id of the partial last block was dropped; None if neither fits."""
    full = prompt_tokens // block_size
    if len(ids) == full:
        return ids, False
    if len(ids) == full + 1 and prompt_tokens % block_size:
        return ids[:full], True
    return None


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

# What reading a damaged or truncated container raises.
CONTAINER_ERRORS = (OSError, EOFError, lzma.LZMAError, tarfile.TarError, gzip.BadGzipFile)


def container_fault(path: str | Path, error: Exception) -> TraceError:
    return TraceError(f"cannot be read ({error}); the file is truncated or damaged, get it again", file=str(path))
