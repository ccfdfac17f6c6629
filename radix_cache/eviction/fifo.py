"""First in, first out: the node that was inserted longest ago goes, used or not.

Use it only as a lower mark: old nodes are the heads of long conversations, which everything below depends on.
Source: as for LRU; SGLang ships it as ``fifo``.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


def key(f: NodeFeatures) -> float:
    return f.inserted


@register("fifo")
def fifo() -> EvictionPolicy:
    return EvictionPolicy("fifo", key)
