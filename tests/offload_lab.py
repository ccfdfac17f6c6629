"""An M3 KV pool, SGLang's allocator, and the real connector and cache over a real daemon, without a model."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.unified_cache.components import ComponentType  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from agentserve.runtime import sglang_lmcache_pool, sglang_plugin, speculation  # noqa: E402
from offload.settings import OffloadSettings  # noqa: E402

PAGE = 128
CHUNK = 256


def apply_hooks() -> None:
    """Put offloading's hooks in place in this process, each once."""
    hooks = sglang_plugin.offload_hooks()
    missing = tuple(hook for hook in hooks if hook.target not in HookRegistry._patched)
    if missing:
        sglang_plugin._register_hooks(missing)
        HookRegistry.apply_hooks()
    sglang_plugin.require_applied(hooks)


def m3_pool(size: int, dtype: torch.dtype = torch.float32, index_dtype: torch.dtype | None = None) -> Any:
    """SGLang's pool for four layers: one dense, one sparse with index values, two sparse without."""
    return memory_pool.MiniMaxSparseKVPool(
        size=size,
        page_size=PAGE,
        dtype=dtype,
        index_dtype=index_dtype,
        head_num=2,
        head_dim=32,
        idx_head_dim=32,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2, 3],
        disable_value_sparse_layer_ids=[2, 3],
        device="cpu",
        start_layer=0,
        end_layer=4,
    )


def draft_pool(size: int, dtype: torch.dtype = torch.float32) -> Any:
    """The pool of a draft of one layer, with other heads than the target's."""
    from agentserve.runtime.sglang_eagle3_pool import PlainKVPool

    return PlainKVPool(
        size=size,
        page_size=PAGE,
        dtype=dtype,
        head_num=4,
        head_dim=32,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )


def tensors(pool: Any) -> list[torch.Tensor]:
    """K, V, index K and index V of the pool, and K and V of its draft, found without the code under test."""
    index = [*pool.index_k_pool.k_buffer, *pool.index_kv_pool.k_buffer, *pool.index_kv_pool.v_buffer]
    draft = getattr(pool, "agentserve_draft", None)
    drafts = [] if draft is None else [*draft.pool.k_buffer, *draft.pool.v_buffer]
    return [*pool.main_pool.k_buffer, *pool.main_pool.v_buffer, *index, *drafts]


def fill(pool: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors(pool):
        tensor.view(torch.uint8).random_(0, 120, generator=generator)


def rows(pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
    """What all planes hold at the slots, as bytes."""
    return [tensor[slots].view(torch.uint8).clone() for tensor in tensors(pool)]


def put(pool: Any, slots: torch.Tensor, held: list[torch.Tensor]) -> None:
    """Write back what ``rows`` returned."""
    for tensor, data in zip(tensors(pool), held, strict=True):
        tensor[slots] = data.view(tensor.dtype)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def tokens_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(16, 300) for _ in range(count)]


class Lab:
    """One engine's memory with its connection to a daemon."""

    def __init__(
        self,
        settings: OffloadSettings,
        checkpoint: Path,
        *,
        size: int = 8192,
        seed: int | None = 1,
        tp_rank: int = 0,
        tp_size: int = 1,
        draft: Path | None = None,
        dtype: torch.dtype = torch.float32,
        index_dtype: torch.dtype | None = None,
    ) -> None:
        self._environment_before = dict(os.environ)
        os.environ.update(settings.environment())
        os.environ.pop(speculation.MODE_VARIABLE, None)
        if draft is not None:
            os.environ[speculation.MODE_VARIABLE] = "real"
        apply_hooks()
        self.pool = m3_pool(size, dtype, index_dtype)
        if draft is not None:
            sglang_lmcache_pool.attach_draft(self.pool, sglang_lmcache_pool.Draft(draft_pool(size, dtype), draft))
        if seed is not None:
            fill(self.pool, seed)
        self.allocator = PagedTokenToKVPoolAllocator(
            size, page_size=PAGE, dtype=dtype, device="cpu", kvcache=self.pool, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tree_components=(ComponentType.FULL,),
            tree_core_backend="python",
            tp_cache_group=torch.distributed.group.WORLD if tp_size > 1 else None,
        )
        from sglang.srt.mem_cache.storage.lmcache import lmcache_unified_radix_cache

        model = SimpleNamespace(
            model_path=str(checkpoint),
            dtype=index_dtype or dtype,
            quantization=None,
            attention_arch=AttentionArch.MHA,
            hf_config=SimpleNamespace(architectures=["MiniMaxM3SparseForCausalLM"]),
        )
        self.cache: Any = lmcache_unified_radix_cache.LMCacheUnifiedRadixCache(
            params,
            model_config=model,
            tp_size=tp_size,
            tp_rank=tp_rank,
            lmcache_config_file=None,
            forward_stream=None,
        )
        self.connector: Any = self.cache.lmcache_connector

    def take(self, tokens: int) -> torch.Tensor:
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        assert slots is not None, "the lab's pool is full"
        return slots

    def store(self, name: str, prompt: list[int], slots: torch.Tensor, wait_s: float = 20.0) -> bool:
        """Store what the slots hold as the prompt's state, and wait."""
        operation = self.connector.submit_store(name, prompt, [slots], device_indices_start=0, cache_salt="")
        if operation is None:
            return False
        wait_until(operation.query, wait_s)
        done = bool(self.connector.complete_store(operation))
        self.connector.finish_request(name)
        return done

    def request(self, name: str, prompt: list[int]) -> SimpleNamespace:
        """What the scheduler does when a request arrives: a lookup."""
        self.cache.prefetch_from_storage(handle(name), self.cache.root_node_handle(), prompt)
        return SimpleNamespace(rid=name, cache_request_handle=handle(name))

    def found(self, request: SimpleNamespace, wait_s: float = 20.0) -> int:
        """Tokens that the lookup of a request found."""
        wait_until(lambda: self.cache.check_prefetch_progress(request.cache_request_handle), wait_s)
        flow = self.cache._external_flows.get(request.rid)
        return 0 if flow is None else int(flow.total_hit)

    def load(self, request: SimpleNamespace) -> torch.Tensor | None:
        """Load what was found; the slots it is in, or None where it has to be recomputed."""
        count, _ = self.cache.init_load_back(
            InitLoadBackParams(best_match_node=self.cache.root_node_handle(), host_hit_length=0, req=request)
        )
        flow = self.cache._external_flows.get(request.rid)
        if not count or flow is None:
            return None
        slots: torch.Tensor = flow.load.device_indices
        return slots

    def close(self) -> None:
        self.cache.shutdown()
        # Other tests of this process must not find an offload switched on.
        os.environ.clear()
        os.environ.update(self._environment_before)


def handle(name: str) -> CacheRequestHandle:
    return CacheRequestHandle(name, 0)


def slack() -> float:
    """Seconds that an operation may take beyond its deadline: 1, or more where processes queue for the cores."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(condition: Any, seconds: float, interval: float = 0.005) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds} s"
        time.sleep(interval)


@contextmanager
def lab(settings: OffloadSettings, checkpoint: Path, **options: Any) -> Iterator[Lab]:
    made = Lab(settings, checkpoint, **options)
    try:
        yield made
    finally:
        made.close()
