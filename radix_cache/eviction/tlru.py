"""Tail-optimized LRU: a conversation keeps only what holds its next prefill under a budget of tokens.

A conversation of ``context`` tokens whose next prompt adds about ``next_prompt`` may lose its tail until
``threshold`` tokens would have to be computed; such tails go first, then recency decides. Use it where the tail of
TTFT matters and the hit rate does not: it gives up hits that LRU would have kept.
Source: Zhang et al., arXiv:2510.15152; SGLang's ``tlru``.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import NodeFeatures


@register("tlru")
def tlru(threshold: float = 4096, next_prompt: float = 0) -> EvictionPolicy:
    """Both parameters are tokens."""

    def key(f: NodeFeatures) -> float:
        return f.last_access

    def group(f: NodeFeatures) -> int:
        return 0 if f.depth - f.size >= f.context + next_prompt - threshold else 1

    return EvictionPolicy("tlru", key, group, groups=2, uses_depth=True)
