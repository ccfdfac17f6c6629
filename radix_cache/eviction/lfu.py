"""Least frequently used: the node that the fewest prompts found goes; among equals the least recent.

Do not use it for agents: dead conversations keep their counts, and the newest turns, sure to be read again, have
none. It is here because servers ship it. Source: SGLang's ``lfu``.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


def key(f: NodeFeatures) -> float:
    return f.hits


@register("lfu")
def lfu() -> EvictionPolicy:
    return EvictionPolicy("lfu", key)
