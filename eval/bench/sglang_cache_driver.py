"""Our live cache as SGLang builds it, driven by recorded events: no scheduler, no model, no server.

What a request does to the cache is done in the order in which SGLang 0.5.23 does it: match and lock, make room for
what is missing and a page more, insert the prompt, and at the end insert prompt and answer, split where the prompt
ends, unlock. ``start`` and ``finish`` do it in two calls; ``look_up``, ``prefill``, ``keep``, ``decode`` and
``release`` are what a scheduler's steps do with several requests in flight. It takes milliseconds where a server takes
seconds, and it is the live code that decides.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402

from agentserve.runtime import sglang_radix_cache  # noqa: E402
from agentserve.runtime.policy_settings import BACKEND, PolicySettings  # noqa: E402
from agentserve.runtime.sglang_policy_tree import PolicyFullComponent  # noqa: E402
from radix_cache.features import Stop  # noqa: E402


class Slots:
    """Token slots without memory behind them, as SGLang's allocators hand them out."""

    device = "cpu"

    def __init__(self, size: int, page_size: int) -> None:
        self.size, self.page_size = size, page_size
        self._unused = list(range(size))

    def available_size(self) -> int:
        return len(self._unused)

    def take(self, tokens: int) -> torch.Tensor:
        assert tokens <= len(self._unused)
        taken = self._unused[len(self._unused) - tokens :]
        del self._unused[len(self._unused) - tokens :]
        return torch.tensor(taken, dtype=torch.int64)

    def unused(self) -> list[int]:
        return list(self._unused)

    def free(self, slots: torch.Tensor) -> None:
        self._unused += slots.tolist()

    def free_segment(self, slots: torch.Tensor, *, start_pos: int) -> None:
        self.free(slots)

    def mamba_full_cache_donor(self) -> None:
        """This pool holds nothing but full KV."""


class _Request:
    """The part of SGLang's request that the cache reads, and what the driver keeps beside it."""

    extra_key = cache_salt = session = None

    def __init__(self, rid: str, prompt: Sequence[int], session_id: str | None) -> None:
        self.rid, self.origin_input_ids, self.session_id = rid, array("q", prompt), session_id
        self.answer: array[int] = array("q")  # as far as it has KV
        self.found: Any = None  # of the last match
        self.lock: Any = None
        self.length = 0  # tokens that have slots
        self.kept = 0  # tokens that the tree holds for it, locked
        self.inserted = 0  # tokens that it inserted itself
        self.slots = torch.empty(0, dtype=torch.int64)  # KV of prompt and answer, in whole pages


class CacheDriver:
    """One live cache.

    Args:
        eviction: policy as ``radix_cache.eviction`` names it.
        capacity: tokens.
        page_size: tokens.
        truncate: whether the last victim loses only what is needed.
    """

    def __init__(self, eviction: str, capacity: int, page_size: int, *, truncate: bool = True) -> None:
        settings = PolicySettings(eviction, "none", truncate)
        sglang_radix_cache.register_backend(settings)
        self._page = page_size
        self._slots = Slots(capacity // page_size * page_size, page_size)
        self.cache: Any = sglang_radix_cache.cache_class(settings)(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._slots,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=BACKEND,
                component_registry_override={ComponentType.FULL: PolicyFullComponent},
            )
        )
        self._running: dict[str, _Request] = {}
        self.evicted = 0  # tokens
        self.refused = 0  # requests for which no memory was left

    def arrive(self, rid: str, prompt: Sequence[int], session_id: str | None, now: float) -> None:
        """A request is in the queue."""
        self.cache.tick(now)
        request = self._running[rid] = _Request(rid, prompt, session_id)
        self.cache.flow_of(request)

    def start(self, rid: str, now: float, held_pages: int, *, spare_pages: int = 0) -> int | None:
        """Begin a request that needs ``held_pages`` while it runs, less ``spare_pages`` when memory is short.

        Returns:
            The prompt tokens that hit; None where too little can be evicted beside what runs. Such a request leaves
            nothing in the cache.
        """
        self.cache.tick(now)
        request = self._running[rid]
        prompt = request.origin_input_ids
        found = self.cache.match_prefix(MatchPrefixParams(key=self._key(prompt[:-1]), req=request))
        request.lock = self.cache.lock(found.last_device_node)
        hit = int(found.device_prefix_len)
        missing = held_pages * self._page - hit
        short = missing - self._slots.available_size()
        if short > self.cache.tree_core.full_evictable_size():
            missing -= spare_pages * self._page
            short -= spare_pages * self._page
        if short > self.cache.tree_core.full_evictable_size():
            self.cache.unlock(request.lock)
            request.lock = None
            self.refused += 1
            return None
        if short > 0:
            self.evicted += self.cache.evict_for_alloc(EvictParams(num_tokens=short)).num_tokens_evicted
        request.slots = torch.cat([self.cache.path_device_indices(found.last_device_node), self._slots.take(missing)])
        request.kept = hit
        self._insert(request, prompt)
        return hit

    def finish(self, rid: str, answer: Sequence[int], stop: Stop, now: float) -> None:
        """End a request: what it computed of ``answer`` stays, what it held besides is free."""
        self.cache.tick(now)
        request = self._running.pop(rid)
        prompt = request.origin_input_ids
        flow = self.cache.flow_of(request)
        self.cache.table.finish(flow, rid, stop, len(prompt) + len(answer), now)
        if request.lock is not None:
            self._insert(request, prompt + array("q", answer[:-1]))
            self._free(request)

    def look_up(self, rid: str, now: float) -> int:
        """Match a waiting request, as a scheduler does each time that it looks at it. Returns the tokens that hit."""
        self.cache.tick(now)
        request = self._running[rid]
        tokens = request.origin_input_ids + request.answer
        request.found = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens[:-1]), req=request))
        return int(request.found.device_prefix_len)

    def prefill(self, chunks: Sequence[tuple[str, int]], now: float) -> None:
        """One allocation for chunks of requests, each from where it stands up to some token."""
        self.cache.tick(now)
        wanted = 0
        for rid, until in chunks:
            request = self._running[rid]
            if request.lock is None:
                node = request.found.last_device_node
                request.lock = self.cache.lock(node)
                request.slots = self.cache.path_device_indices(node)
                request.kept = request.length = int(request.found.device_prefix_len)
            wanted += until - request.length + self._page
        self._make_room(wanted)
        for rid, until in chunks:
            self._take(self._running[rid], until)

    def keep(self, rid: str, now: float) -> None:
        """A chunk is computed: the tree gets what the request has so far."""
        self.cache.tick(now)
        request = self._running[rid]
        self._insert(request, (request.origin_input_ids + request.answer)[: request.length])

    def decode(self, tokens: Sequence[tuple[str, int]], now: float) -> None:
        """One allocation for a decode step: each request takes its newest token in."""
        self.cache.tick(now)
        self._make_room(len(tokens) * self._page)
        for rid, token in tokens:
            request = self._running[rid]
            request.answer.append(token)
            self._take(request, request.length + 1)

    def release(self, rid: str, now: float) -> None:
        """Take a running request's memory back; it is to be matched again."""
        self.cache.tick(now)
        request = self._running[rid]
        self._free(request)
        request.kept = request.inserted = request.length = 0

    def end(self, name: str, now: float) -> None:
        """A session or flow is over."""
        self.cache.tick(now)
        self.cache.end_session(name)

    def check(self) -> None:
        """Raise AssertionError unless the tree is whole and every slot is held once; call it when nothing runs."""
        core = self.cache.tree_core
        core.sanity_check([], [])
        held = core.all_values_flatten().tolist() + self._slots.unused()
        assert sorted(held) == list(range(self._slots.size)), "slots of the cache were lost or are held twice"

    def _key(self, tokens: Sequence[int]) -> Any:
        return RadixKey(array("q", tokens), None).page_aligned(self._page)

    def _make_room(self, tokens: int) -> None:
        short = tokens - self._slots.available_size()
        if short > 0:
            self.evicted += self.cache.evict_for_alloc(EvictParams(num_tokens=short)).num_tokens_evicted

    def _take(self, request: _Request, until: int) -> None:
        pages = -(-until // self._page) - len(request.slots) // self._page
        request.slots = torch.cat([request.slots, self._slots.take(pages * self._page)])
        request.length = until

    def _free(self, request: _Request) -> None:
        self._slots.free(request.slots[request.kept :])
        request.slots = request.slots[:0]
        self.cache.unlock(request.lock)
        request.lock = None

    def _insert(self, request: _Request, tokens: Sequence[int]) -> None:
        """Insert a sequence of which ``kept`` tokens are in the tree and locked; the lock moves to its end."""
        key = self._key(tokens)
        whole = len(key)
        if whole == 0:
            return
        values = request.slots[:whole].clone()
        result = self.cache.insert(
            InsertParams(key=key, value=values, prev_prefix_len=request.kept, inserted_len=request.inserted)
        )
        prompt = self._key(request.origin_input_ids)
        if 0 < len(prompt) < whole:
            head = values[: len(prompt)].clone()
            self.cache.insert(
                InsertParams(key=prompt, value=head, prev_prefix_len=len(prompt), inserted_len=len(prompt))
            )
        end = result.last_device_node
        request.slots[:whole] = self.cache.path_device_indices(end)
        request.kept = request.inserted = whole
        self.cache.unlock(request.lock)
        request.lock = self.cache.lock(end)
        self.cache.tree_core.note_path(self.cache.flow_of(request), end)
