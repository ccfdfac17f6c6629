"""Least recently used: the default of SGLang and vLLM.

Use it as the yardstick, and where memory holds all live conversations: then nothing does better.
Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


def key(f: NodeFeatures) -> float:
    return f.last_access


@register("lru")
def lru() -> EvictionPolicy:
    return EvictionPolicy("lru", key)
