"""Dead first, then recency with a handicap for conversations that wait for a person.

Ended conversations and abandoned branches go first. The rest goes by last access, but a conversation that is not
in a tool call counts as ``handicap`` seconds older: after a tool call the next turn comes within seconds, after
an answer within minutes or never. Use it where a simple rule is wanted: it has nothing to learn.
Source: the idea of a time to live per tool call, Continuum (Li et al., arXiv:2511.02230), in its simplest form.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import FlowState, NodeFeatures, Stop

_TOOL = int(Stop.TOOL)
_ENDED = int(FlowState.ENDED)
_PARKED = int(FlowState.PARKED)


@register("ttl")
def ttl(handicap: float = 60) -> EvictionPolicy:
    """``handicap``: seconds by which a conversation outside a tool call looks older."""

    def key(f: NodeFeatures) -> float:
        return f.last_access if f.stop == _TOOL else f.last_access - handicap

    def group(f: NodeFeatures) -> int:
        if f.superseded > 0:
            return 0
        if f.sharers < 2:
            if f.state == _ENDED:
                return 0
            if f.state == _PARKED:
                return 1
        return 2

    return EvictionPolicy("ttl", key, group, groups=3)
