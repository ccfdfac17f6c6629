"""Weka files: a directory with a JSON file a session (``traces.readers.weka``). Holds everything the model has.

Spawn and join of subagents are not in the format: readers infer them from the times, and where that gives others they
count as lost.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.model import Session
from traces.spawn import attach
from traces.write import write_weka
from traces.writers.base import TraceWriter, Write, loss_of, register

_KEPT = frozenset(["id", "tool_tokens", "system_tokens", "start_s", "think_s", "api_s", "stop", "model", "duration_s"])


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    path.mkdir()
    written = 0

    def write(session: Session) -> None:
        nonlocal written
        written += 1
        # The number keeps the order and names apart that differ only in characters that no file name has.
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", session.id)[:80]
        write_weka(session, path / f"{written:06d}-{name}.json")

    yield write


def weka_loss(session: Session) -> Counter[str]:
    """What Weka JSON does not hold of a session."""
    lost = loss_of(session, kept=_KEPT, clock=False)
    for flow in session.subagents:
        last = flow.turns[-1]
        end = last.start_s + (last.api_s or 0.0) if flow.duration_s is None else flow.start_s + flow.duration_s
        spawn, join = attach(flow.start_s, end, session.main.turns)
        lost["spawn_after"] += spawn != flow.spawn_after
        lost["join_before"] += join != flow.join_before
    return +lost


register(TraceWriter("weka", (), _open, weka_loss))
