"""Segmented LRU: nodes found fewer than ``threshold`` times go first, each segment in order of last access.

It keeps one-off prompts from flushing the cache. Use it where most prompts never come back; a conversation's
newest turns always look like one-off prompts.
Source: Karedla, Love, Wherry, "Caching strategies to improve disk system performance", Computer 27(3), 1994;
SGLang's ``slru``.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


@register("slru")
def slru(threshold: float = 2) -> EvictionPolicy:
    """``threshold``: hits from which a node is protected."""

    def key(f: NodeFeatures) -> float:
        return f.last_access

    def group(f: NodeFeatures) -> int:
        return 1 if f.hits >= threshold else 0

    return EvictionPolicy("slru", key, group, groups=2)
