"""Explains the gap between ideal and realized hits, token by token. Pure; see ``docs/design/attribution.md``."""

from radix_cache.attribution.causes import Cause, EvictedBy, Loss, VictimState
from radix_cache.attribution.levels import Attribution, CacheKind, Lengths, attribute, reachable, without_events
from radix_cache.attribution.sweep import Asked, Sweep
from radix_cache.attribution.tier import TierAnswer

__all__ = [
    "Asked",
    "Attribution",
    "CacheKind",
    "Cause",
    "EvictedBy",
    "Lengths",
    "Loss",
    "Sweep",
    "TierAnswer",
    "VictimState",
    "attribute",
    "reachable",
    "without_events",
]
