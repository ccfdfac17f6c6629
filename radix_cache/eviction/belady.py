"""Belady's rule: the node whose next use is furthest away goes. Offline only: it has read the future.

Use it to see what any policy could still win. On a prefix tree with running requests that cannot be evicted it is
no proven optimum, but nothing was found to beat it. It needs a workload whose order of requests does not depend on
the cache (service model ``fixed``).
Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


def key(f: NodeFeatures) -> float:
    return -f.next_use


@register("belady")
def belady() -> EvictionPolicy:
    return EvictionPolicy("belady", key, offline=True)
