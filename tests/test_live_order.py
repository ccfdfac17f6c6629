"""The victim order of the live cache against a scan of everything."""

from __future__ import annotations

import random

import pytest

from agentserve.runtime.policy_order import VictimOrder
from radix_cache.eviction import EvictionPolicy, eviction_policy
from radix_cache.gaps import AGE_EDGES, GapTable, age_bin


def scan(items: dict[int, tuple[int, float, float]], policy: EvictionPolicy, gaps: GapTable, now: float) -> int:
    def score(item: int) -> tuple[bool, float, float, float]:
        group, key, stamp = items[item]
        learned = group in policy.learned_groups
        rank = gaps.ranks[policy.learned_groups.index(group), age_bin(now - key, AGE_EDGES)] if learned else group
        return learned, float(rank), key, stamp

    return min(items, key=score)


@pytest.mark.parametrize("spec", ["lru", "ttl", "gittins", "slru"])
@pytest.mark.parametrize("seed", range(5))
def test_pops_what_a_scan_of_all_items_finds(spec: str, seed: int) -> None:
    rng = random.Random(seed)
    policy, gaps = eviction_policy(spec), GapTable()
    order: VictimOrder[int] = VictimOrder(policy, gaps)
    items: dict[int, tuple[int, float, float]] = {}
    now, stamp, popped = 0.0, 0.0, 0
    for _ in range(3000):
        now += rng.expovariate(0.5)
        if rng.random() < 0.1 and policy.learned_groups:
            gaps.observe(rng.randrange(len(gaps.counts)), rng.lognormvariate(2, 2))
        action = rng.random()
        if action < 0.6:
            stamp += 1
            item = rng.randrange(200)
            items[item] = (rng.randrange(policy.groups), now - rng.choice([0.0, 0.0, 7.0]), stamp)
            order.put(item, *items[item])
        elif action < 0.65:
            item = rng.randrange(200)
            items.pop(item, None)
            order.discard(item)
        elif items:
            order.grow_old(now)
            for _ in range(min(len(items), rng.randrange(1, 4))):
                expected = scan(items, policy, gaps, now)
                assert order.pop() == expected
                del items[expected]
                popped += 1
                if rng.random() < 0.3:  # a parent becomes a leaf in the middle of a walk
                    stamp += 1
                    items[1000 + popped] = (rng.randrange(policy.groups), now - 50 * rng.random(), stamp)
                    order.put(1000 + popped, *items[1000 + popped])
    assert len(order) == len(items)
    assert popped > 500


def test_items_used_again_and_again_do_not_pile_up() -> None:
    order: VictimOrder[int] = VictimOrder(eviction_policy("lru"), GapTable())
    for stamp in range(100_000):
        order.put(stamp % 10, 0, float(stamp), stamp)
    assert sum(len(heap) for heap in order._heaps.values()) < 2000
    assert [order.pop() for _ in range(11)] == [*range(10), None]
    assert order.rebuilds > 10


def test_ties_of_rank_and_key_go_by_stamp() -> None:
    order: VictimOrder[str] = VictimOrder(eviction_policy("lru"), GapTable())
    order.put("later", 0, 1.0, 2.0)
    order.put("earlier", 0, 1.0, 1.0)
    assert [order.pop(), order.pop(), order.pop()] == ["earlier", "later", None]
