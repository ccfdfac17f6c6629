"""The contract of an eviction policy, and its registry.

A policy is pure. It sorts nodes into a few *groups* and orders the nodes of one group by a *key*; the next victim
is the evictable leaf with the least ``(rank of its group, key, last access)``. Neither group nor key may depend
on ``now``: they change only when a node is used or its flow's state changes, so a queue stays valid without
rescoring. What depends on time goes through the rank: a policy that learns has one rank per (group, age bin),
see ``radix_cache.gaps``, and its key must be the last access. For all others a group's rank is its number.

To add a policy, write one file in this folder with one ``@register("name")`` function that returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from radix_cache.features import NodeFeatures


def one_group(f: NodeFeatures) -> int:
    """All nodes compete by key alone."""
    return 0


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """Attributes:

    name: as registered.
    key: order within a group, least first.
    group: group of a node, ``0 <= group < groups``, least rank first.
    groups: how many groups there are.
    learned_groups: groups whose rank is learned from gaps, for each age bin; empty for a fixed order. The other
        groups of a learning policy rank below all learned ones, in order of their number.
    uses_depth: whether group or key change along a node (``depth``, ``size``): the tail of a node can then be a
        better victim than its head.
    offline: needs ``next_use``, which only a simulator knows.
    """

    name: str
    key: Callable[[NodeFeatures], float]
    group: Callable[[NodeFeatures], int] = one_group
    groups: int = 1
    learned_groups: tuple[int, ...] = ()
    uses_depth: bool = False
    offline: bool = False


EVICTION: dict[str, Callable[..., EvictionPolicy]] = {}


def register(
    name: str,
) -> Callable[[Callable[..., EvictionPolicy]], Callable[..., EvictionPolicy]]:
    """Make a function of numeric parameters known as the policy ``name``."""

    def keep(build: Callable[..., EvictionPolicy]) -> Callable[..., EvictionPolicy]:
        if name in EVICTION:
            raise ValueError(f"eviction policy {name!r} is registered twice")
        EVICTION[name] = build
        return build

    return keep
