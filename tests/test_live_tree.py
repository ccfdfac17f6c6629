"""Our tree inside SGLang's cache, without a server: the same workload through SGLang's own cache and through ours."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache  # noqa: E402

from agentserve.runtime import sglang_radix_cache  # noqa: E402
from agentserve.runtime.policy_settings import PolicySettings  # noqa: E402
from agentserve.runtime.sglang_policy_tree import PolicyFullComponent, victim_kind  # noqa: E402
from radix_cache.features import Stop  # noqa: E402

PAGE = 4


class Pool:
    """Token slots as an allocator hands them out; every slot is free or used exactly once."""

    device = "cpu"
    page_size = PAGE

    def __init__(self, size: int) -> None:
        self.size = size
        self.unused = list(range(size))

    def available_size(self) -> int:
        return len(self.unused)

    def take(self, tokens: int) -> torch.Tensor:
        taken, self.unused = self.unused[:tokens], self.unused[tokens:]
        assert len(taken) == tokens
        return torch.tensor(taken, dtype=torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        given = slots.tolist()
        assert not set(given) & set(self.unused)
        self.unused += given

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        self.free(slots)

    def mamba_full_cache_donor(self) -> None:
        """This pool holds nothing but full KV."""


def params(pool: Pool) -> CacheInitParams:
    return CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=pool,
        page_size=PAGE,
        tree_components=(ComponentType.FULL,),
        tree_core_backend="python",
    )


def theirs(pool: Pool) -> UnifiedRadixCache:
    return UnifiedRadixCache(params(pool))


def ours(pool: Pool, eviction: str, *, truncate: bool) -> Any:
    settings = PolicySettings(eviction, "none", truncate)
    sglang_radix_cache.register_backend(settings)
    made = params(pool)
    made.tree_core_backend = "agentserve"
    made.component_registry_override = {ComponentType.FULL: PolicyFullComponent}
    return sglang_radix_cache.cache_class(settings)(made)


def key(tokens: list[int]) -> RadixKey:
    return RadixKey(array("q", tokens), None).page_aligned(PAGE)


def request(cache: Any, pool: Pool, tokens: list[int]) -> int:
    """Match, make room, insert: what the scheduler does for a prompt. Returns the matched tokens."""
    k = key(tokens)
    found = cache.match_prefix(MatchPrefixParams(key=k))
    lock = cache.lock(found.last_device_node)
    hit: int = found.device_prefix_len
    short = len(k) - hit - pool.available_size()
    if short > 0:
        cache.evict_for_alloc(EvictParams(num_tokens=short))
    value = torch.cat([cache.path_device_indices(found.last_device_node), pool.take(len(k) - hit)])
    cache.insert(InsertParams(key=k, value=value, prev_prefix_len=hit))
    cache.unlock(lock)
    return hit


def conversations(seed: int, turns: int) -> list[list[int]]:
    """Prompts of interleaved conversations that share a head, grow, and now and then go another way."""
    rng = random.Random(seed)
    head = [rng.randrange(1000) for _ in range(24)]
    live = [head[: rng.choice([8, 24])] for _ in range(12)]
    prompts = []
    for _ in range(turns):
        i = rng.randrange(len(live))
        if rng.random() < 0.1:
            live[i] = live[i][: rng.randrange(4, len(live[i]) + 1)]
        if len(live[i]) > 250:
            live[i] = head[:]
        live[i] = live[i] + [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        prompts.append(live[i])
    return prompts


@pytest.mark.parametrize("seed", range(5))
def test_lru_evicts_what_sglang_lru_evicts(seed: int) -> None:
    pools = Pool(1200), Pool(1200)
    caches = theirs(pools[0]), ours(pools[1], "lru", truncate=False)
    evicting = 0
    for step, prompt in enumerate(conversations(seed, 400)):
        caches[1].tick(step * 0.25)
        before = pools[0].available_size()
        hits = [request(cache, pool, prompt) for cache, pool in zip(caches, pools, strict=True)]
        assert hits[0] == hits[1], step
        # The same slots in the same order: every eviction was the same.
        assert pools[0].unused == pools[1].unused, step
        evicting += before < len(prompt) - hits[0]
    assert evicting > 100


@pytest.mark.parametrize("eviction", ["lru", "ttl", "gittins", "tlru", "slru", "lfu", "fifo"])
def test_every_policy_keeps_the_tree_whole(eviction: str) -> None:
    pool = Pool(1200)
    cache = ours(pool, eviction, truncate=True)
    for step, prompt in enumerate(conversations(7, 400)):
        cache.tick(step * 0.25)
        request(cache, pool, prompt)
        assert cache.tree_core.full_evictable_size() + pool.available_size() == pool.size
    cache.tree_core.sanity_check([], [])
    held = cache.tree_core.all_values_flatten().tolist()
    assert sorted(held + pool.unused) == list(range(pool.size))


def test_the_last_victim_loses_only_what_is_needed() -> None:
    pool = Pool(100)
    cache = ours(pool, "lru", truncate=True)
    request(cache, pool, list(range(80)))
    request(cache, pool, list(range(500, 532)))  # 12 short
    assert cache.match_prefix(MatchPrefixParams(key=key(list(range(80))))).device_prefix_len == 68
    assert pool.available_size() == 0
    whole = ours(pool2 := Pool(100), "lru", truncate=False)
    request(whole, pool2, list(range(80)))
    request(whole, pool2, list(range(500, 532)))
    assert whole.match_prefix(MatchPrefixParams(key=key(list(range(80))))).device_prefix_len == 0


def test_a_cut_node_keeps_its_place_in_the_order() -> None:
    pool = Pool(120)
    cache = ours(pool, "lru", truncate=True)
    for first, now in ((0, 1.0), (100, 2.0)):
        cache.tick(now)
        request(cache, pool, list(range(first, first + 60)))
    cache.tick(3.0)
    for first in (200, 300):  # both times at the expense of the oldest
        request(cache, pool, list(range(first, first + 20)))
    lengths = {
        first: cache.match_prefix(MatchPrefixParams(key=key(list(range(first, first + 60))))).device_prefix_len
        for first in (0, 100)
    }
    assert lengths == {0: 20, 100: 60}


class Turn:
    """The part of SGLang's request that says who it is."""

    extra_key = cache_salt = None

    def __init__(self, rid: str, tokens: list[int], session_id: str | None = None) -> None:
        self.rid, self.origin_input_ids, self.session_id = rid, array("q", tokens), session_id


def turn(
    cache: Any, pool: Pool, rid: str, tokens: list[int], now: float, stop: Stop, session: str | None = None
) -> int:
    """A whole request of a conversation, as scheduler and cache live through it."""
    cache.tick(now)
    req = Turn(rid, tokens, session)
    flow = cache.flow_of(req)
    k = key(tokens)
    found = cache.match_prefix(MatchPrefixParams(key=k))
    cache.tree_core.note_match(flow, found.last_device_node)
    hit = request(cache, pool, tokens)
    cache.table.finish(flow, rid, stop, len(tokens), now)
    end = cache.match_prefix(MatchPrefixParams(key=k)).last_device_node
    cache.tree_core.note_path(flow, end)
    return hit


def evict(cache: Any, tokens: int) -> None:
    cache.evict(EvictParams(num_tokens=tokens))


def kept(cache: Any, tokens: list[int]) -> int:
    return int(cache.match_prefix(MatchPrefixParams(key=key(tokens))).device_prefix_len)


A, B = list(range(40)), list(range(1000, 1040))


@pytest.mark.parametrize("eviction", ["ttl", "gittins"])
def test_an_ended_session_goes_before_an_older_live_one(eviction: str) -> None:
    pool = Pool(200)
    cache = ours(pool, eviction, truncate=True)
    turn(cache, pool, "1", A, 1.0, Stop.TOOL, "a")
    turn(cache, pool, "2", B, 2.0, Stop.TOOL, "b")
    assert cache.end_session("b")
    assert not cache.end_session("b"), "the second end changes nothing"
    assert not cache.end_session("never seen")
    evict(cache, 40)
    assert (kept(cache, A), kept(cache, B)) == (40, 0)


def test_waiting_for_a_person_goes_before_an_older_tool_call() -> None:
    pool = Pool(200)
    cache = ours(pool, "ttl:handicap=60", truncate=True)
    turn(cache, pool, "1", A, 1.0, Stop.TOOL)
    turn(cache, pool, "2", B, 30.0, Stop.TURN)
    evict(cache, 40)
    assert (kept(cache, A), kept(cache, B)) == (40, 0)


def test_a_branch_the_conversation_left_goes_first() -> None:
    pool = Pool(400)
    cache = ours(pool, "ttl", truncate=True)
    old = [*A, *range(100, 140)]
    turn(cache, pool, "1", B, 0.5, Stop.TOOL)
    turn(cache, pool, "2", A, 1.0, Stop.TOOL)
    turn(cache, pool, "3", old, 2.0, Stop.TOOL)
    turn(cache, pool, "4", [*A, *range(200, 220)], 3.0, Stop.TOOL)  # the third turn was taken back
    evict(cache, 40)
    assert (kept(cache, old), kept(cache, B)) == (40, 40)


def test_a_side_request_of_a_session_abandons_nothing() -> None:
    pool = Pool(400)
    cache = ours(pool, "ttl", truncate=True)
    turn(cache, pool, "1", A, 1.0, Stop.TOOL, "s")
    turn(cache, pool, "2", B, 2.0, Stop.TURN, "s")  # a title for the window, say
    evict(cache, 40)
    assert (kept(cache, A), kept(cache, B)) == (40, 0)


def test_victims_are_named_after_what_was_known_of_them() -> None:
    pool = Pool(400)
    cache = ours(pool, "gittins", truncate=True)
    turn(cache, pool, "1", A, 1.0, Stop.TOOL, "a")
    turn(cache, pool, "2", [*A[:20], *B], 2.0, Stop.TURN, "b")
    kinds = {node.depth: victim_kind(node) for node in cache.tree_core.changed if node.depth}
    assert kinds == {20: "shared", 40: "waits_tool", 60: "waits_turn"}
    cache.end_session("b")
    assert {victim_kind(n) for n in cache.tree_core.changed if n.depth == 60} == {"ended"}


def test_the_clock_never_runs_backwards() -> None:
    cache = ours(Pool(200), "gittins", truncate=True)
    cache.tick(100.0)
    cache.tick(40.0)
    assert cache.tree_core.now == 100.0
