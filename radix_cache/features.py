"""What a policy may know about an evictable node. Pure data; both the simulator and the live tree fill it.

Every field is a number, so that the same policy function runs as plain Python in the server and compiled, over
the same named fields, in the simulator.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class Stop(IntEnum):
    """Why the last answer of a conversation ended: what the conversation waits for now."""

    UNKNOWN = 0
    TOOL = 1  # a tool runs; the next turn comes by itself
    TURN = 2  # a person reads; the next turn comes when they write, or never


class FlowState(IntEnum):
    """What is known of a conversation's future."""

    LIVE = 0
    PARKED = 1  # admission holds its next turn back
    ENDED = 2  # said to be over: nothing of it comes back


class NodeFeatures(NamedTuple):
    """One node of the radix tree at the moment of a decision.

    A *flow* is one line of turns: a session's main conversation or one subagent. Times are seconds on one clock,
    lengths are tokens.
    """

    now: float
    last_access: float  # end of the last request that used the node (its start while that one still runs)
    stop: float  # Stop of the flow that used the node last
    pace: float  # mean of that flow's gaps so far, in age bins (``radix_cache.gaps``); -1.0 before the first
    state: float  # FlowState of that flow
    superseded: float  # 1.0 when only one flow used the node and that flow has since gone another way
    sharers: float  # flows that used the node since it was inserted: 1.0, or 2.0 for two or more
    depth: float  # tokens from the root to the node's end
    size: float  # tokens that go at once: the node, or one page where victims are truncated
    context: float  # length of the last user's conversation so far, prompt and answer
    hits: float  # prompts that found the node in the cache since it was inserted
    inserted: float  # when the node was inserted
    next_use: float  # when a request will need it next; inf for never, or where the future is not known


FEATURE_COUNT = len(NodeFeatures._fields)
