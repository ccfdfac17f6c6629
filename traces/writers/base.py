"""What a trace is written by, and the one way to do it: ``write_trace``, which also counts what the format cannot hold.

A format is one file in this folder that registers a ``TraceWriter``. Ids are brought into its blocks and namespace
before (``traces.reblock``). What is lost is counted per field of ``traces.model``; a test writes and reads back
random sessions with every writer and holds the counts against the differences.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from radix_cache.theory import common_blocks, known_prefix
from traces.model import BlockIds, BlockScope, Session, TraceError
from traces.reblock import BlockSizeError, Reblocker, coarser_loss

Write = Callable[[Session], None]
Loss = Callable[[Session], Counter[str]]


class TraceWriter(NamedTuple):
    """A way to write traces.

    Attributes:
        name: what ``--to`` takes; the reader of the same name reads the result.
        endings: how a file of it may be called; empty: a directory.
        open: opens a path for writing sessions one by one.
        loss: per field, how many values of a session the format does not hold.
        block_size: tokens per block; None: any.
        shared: ids of all sessions are in one namespace.
    """

    name: str
    endings: tuple[str, ...]
    open: Callable[[Path], AbstractContextManager[Write]]
    loss: Loss
    block_size: int | None = None
    shared: bool = False


@dataclass(slots=True)
class Written:
    """What was written, and per field how many values were not."""

    sessions: int = 0
    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)


_writers: dict[str, TraceWriter] = {}


def register(writer: TraceWriter) -> None:
    _writers[writer.name] = writer


def writer_names() -> list[str]:
    return list(_writers)


def write_trace(sessions: Iterable[Session], path: str | Path, format: str) -> Written:
    """Write sessions as they come, one in memory at a time. The path appears when everything is written.

    Args:
        sessions: valid sessions; where the format has one namespace for all, it is made here.
        path: must not exist, and must end as the format's files do.
        format: one of ``writer_names()``.

    Raises:
        TraceError: wrong format or path, or blocks that do not fit the format; and what ``sessions`` raises.
    """
    target = Path(path)
    writer = _writers.get(format)
    if writer is None:
        raise TraceError(f"unknown format '{format}'; known are {', '.join(_writers)}", file=str(path))
    if target.exists():
        raise TraceError("exists already; name another path", file=str(path))
    if writer.endings and not target.name.endswith(writer.endings):
        raise TraceError(f"a file of {format} must end in {' or '.join(writer.endings)}", file=str(path))
    if not target.parent.is_dir():
        raise TraceError("its folder does not exist; create it", file=str(path))
    reblocker = Reblocker(writer.block_size, writer.shared)
    written = Written()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        part = Path(folder) / target.name
        with writer.open(part) as write:
            for session in sessions:
                try:
                    blocked = reblocker.session(session)
                except BlockSizeError as error:
                    raise TraceError(str(error), file=session.source or str(path)) from error
                write(blocked)
                written.sessions += 1
                written.requests += session.request_count
                written.lost += writer.loss(session) + _reblocked_loss(session, writer)
        if not written.sessions:
            raise TraceError("there was no session to write", file=str(path))
        shutil.move(part, target)
    return written


def _reblocked_loss(session: Session, writer: TraceWriter) -> Counter[str]:
    lost = coarser_loss(session, writer.block_size or session.block_size)
    return Counter({BLOCKS: lost} if lost else {})


# Names of losses that are not a field of the model.
BLOCKS = "block_ids (shared prefixes, in part)"
CONVERSATION = "session (which requests follow each other)"
SUBAGENT = "subagents (written as sessions of their own)"


def loss_of(
    session: Session, *, kept: frozenset[str], clock: bool = True, conversations: bool = True, subagents: bool = True
) -> Counter[str]:
    """Values that a format of plain fields does not hold.

    Args:
        session: as it was before writing.
        kept: of ``id, tool_tokens, system_tokens, start_s, think_s, api_s, stop, model, duration_s``, those it holds.
        clock: it holds a start that is not 0; without, sessions start at 0.
        conversations: it says which requests are one session.
        subagents: it says which session a subagent belongs to.
    """
    lost: Counter[str] = Counter()
    lost["id"] = "id" not in kept
    begins = min(turn.start_s for flow in session.flows() for turn in flow.turns)
    if not subagents:
        lost[SUBAGENT] = len(session.subagents)
    for flow in session.flows():
        for name in ("tool_tokens", "system_tokens"):
            lost[name] += name not in kept and getattr(flow, name) > 0
        lost["duration_s"] += "duration_s" not in kept and flow.duration_s is not None
        lost[CONVERSATION] += 0 if conversations else len(flow.turns) - 1
        moved = "start_s" in kept and not clock and (begins if subagents else flow.turns[0].start_s) > 0
        lost["start_s"] += len(flow.turns) if moved else 0
        for turn in flow.turns:
            lost["start_s"] += "start_s" not in kept and turn.start_s > 0
            lost["think_s"] += "think_s" not in kept and turn.think_s is not None
            lost["api_s"] += "api_s" not in kept and turn.api_s is not None
            lost["stop"] += "stop" not in kept and bool(turn.stop.value)
            lost["model"] += "model" not in kept and bool(turn.model)
    return +lost


def lengths_loss(session: Session, block_size: int) -> int:
    """Turns whose shared prefix is lost where only what a prompt shares with the previous one is written."""
    if session.scope is BlockScope.GLOBAL or session.block_size != block_size:
        return session.request_count
    known: set[int] = set()
    before: dict[str, BlockIds] = {}
    lost = 0
    for flow, turn in session.turns_in_arrival_order():
        shared = known_prefix(turn.block_ids, known)
        previous = before.get(flow.name)
        lost += shared > (0 if previous is None else common_blocks(previous, turn.block_ids))
        known.update(turn.block_ids[shared:].tolist())
        before[flow.name] = turn.block_ids
    return lost


@contextmanager
def line_file(path: Path) -> Iterator[Callable[[bytes], None]]:
    """A file of lines, compressed as its name says; the line end is added."""
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
    with openers.get(path.suffix, open)(path, "wb") as stream:

        def write(line: bytes) -> None:
            stream.write(line + b"\n")

        yield write


def microseconds(seconds: float) -> float:
    """Times are written to the microsecond, so that sums of binary fractions read well."""
    return round(seconds, 6)
