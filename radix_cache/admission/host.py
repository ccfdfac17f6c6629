"""What of a conversation is worth writing to the host tier. Pure; times are seconds, lengths tokens.

A host tier that takes everything that was computed spends copies and room on what nobody asks for again: the ends of
conversations that are over, and branches that were left. What several conversations share is worth keeping whatever
became of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from radix_cache.features import FlowState

Reason = Literal["", "ended", "superseded"]
REASONS: tuple[Reason, ...] = ("", "ended", "superseded")


class PathNode(NamedTuple):
    """A node on the path from the root to a conversation's newest token."""

    end: int  # tokens from the root to the node's end
    shared: bool  # several flows have used it
    superseded: bool  # its only flow has gone another way
    state: FlowState  # of the flow that used it last


class Worth(NamedTuple):
    """How much of a path to store."""

    tokens: int  # from the root
    reason: Reason  # why what is behind them is not stored; empty where nothing is


def worth_storing(path: Sequence[PathNode]) -> Worth:
    """The part of a path that somebody may ask for again: up to the last node that is not known to be lost.

    Args:
        path: nodes from the root down.
    """
    reason: Reason = ""
    for node in reversed(path):
        why = REASONS[lost(node.shared, node.superseded, node.state)]
        if not why:
            return Worth(node.end, reason)
        reason = reason or why
    return Worth(0, reason)


def lost(shared: float, superseded: float, state: int) -> int:
    """Why nobody asks for a node again, as an index into ``REASONS``; 0: somebody may.

    Numbers only, so that the simulator can compile it: one rule for both.
    """
    if shared:
        return 0
    if superseded:
        return 2
    return 1 if state == FlowState.ENDED else 0
