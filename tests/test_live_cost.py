"""What choosing victims costs, against SGLang's own lru on the same tree."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from agentserve.runtime.policy_sessions import Flow, Session
from radix_cache.features import Stop
from tests.test_live_tree import PAGE, InsertParams, MatchPrefixParams, Pool, evict, key, ours, theirs

LEAVES = 20_000
TOKENS = 2 * PAGE


def timed(component: Any) -> list[float]:
    """Wrap the two methods that choose; the list grows by the seconds of each call."""
    spent: list[float] = []

    def wrap(name: str) -> None:
        original = getattr(component, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        setattr(component, name, measured)

    wrap("_evict_device_start")
    wrap("_evict_device_next_node")
    return spent


def grown(name: str) -> Any:
    """A tree of 20,000 one-node conversations, all of them used and scored once."""
    pool = Pool(LEAVES * TOKENS)
    cache = theirs(pool) if name == "sglang lru" else ours(pool, "gittins", truncate=True)
    rng = random.Random(1)
    for i in range(LEAVES):
        if name == "gittins":
            cache.tick(i * 0.05)
        end = cache.insert(InsertParams(key=key(prompt_of(i)), value=pool.take(TOKENS))).last_device_node
        if name == "gittins":
            session = Session(str(i))
            cache.tree_core.note_path(Flow(str(i), session, stop=rng.choice(list(Stop))), end)
    assert len(cache.tree_core.evictable_device_leaves) == LEAVES
    evict(cache, TOKENS)
    return cache


def prompt_of(i: int) -> list[int]:
    return list(range(i * 100, i * 100 + TOKENS))


@pytest.mark.timeout(300)
def test_choosing_costs_no_more_than_twice_sglangs_lru() -> None:
    caches = {name: grown(name) for name in ("sglang lru", "gittins")}
    spent = {name: timed(next(iter(cache.components.values()))) for name, cache in caches.items()}
    for victims in (16, 256):
        per_token = {}
        for name, cache in caches.items():
            spent[name].clear()
            rng = random.Random(2)
            for step in range(8):
                if name == "gittins":
                    cache.tick(LEAVES * 0.05 + step)
                for i in rng.sample(range(LEAVES), 200):  # the tree is in use
                    cache.match_prefix(MatchPrefixParams(key=key(prompt_of(i))))
                evict(cache, victims * TOKENS)
            per_token[name] = sum(spent[name]) / (8 * victims * TOKENS) * 1e6
            print(f"{name}: {per_token[name]:.1f} us per evicted token, {victims} victims a walk, {LEAVES} leaves")
        assert per_token["gittins"] <= 2 * per_token["sglang lru"]
