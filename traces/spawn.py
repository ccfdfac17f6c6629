"""Where a subagent starts and ends among the turns of its session."""

from __future__ import annotations

from collections.abc import Sequence

from traces.model import Turn


def attach(start_s: float, end_s: float, main: Sequence[Turn]) -> tuple[int | None, int | None]:
    """(spawn_after, join_before) of a subagent that ran from ``start_s`` to ``end_s`` beside the main turns."""
    before = [turn.index for turn in main if turn.start_s <= start_s]
    after = [turn.index for turn in main if turn.start_s >= end_s]
    spawn_after = before[-1] if before else None
    join_before = after[0] if after else None
    if join_before is not None and spawn_after is not None and join_before <= spawn_after:
        join_before = None  # no time passed; nothing can have waited for it
    return spawn_after, join_before
