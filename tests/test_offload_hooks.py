"""Offloading's hooks against the installed SGLang and LMCache: targets, and what our subclasses rely on."""

from __future__ import annotations

import inspect
import pkgutil
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from lmcache.integration.sglang import unified_lmcache_mp_connector as connector  # noqa: E402
from lmcache.v1.distributed.api import _lookup_kv_ranks  # noqa: E402
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey  # noqa: E402
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import LMCacheDrivenTransferModule  # noqa: E402
from lmcache.v1.multiprocess.modules.lookup import LookupModule  # noqa: E402
from lmcache.v1.multiprocess.transfer_context import worker_transfer  # noqa: E402
from sglang.srt.arg_groups import kv_cache_hook  # noqa: E402
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.storage.lmcache import lmcache_unified_radix_cache as cache  # noqa: E402

from agentserve.runtime import sglang_lmcache_draft, sglang_lmcache_pool, sglang_plugin  # noqa: E402
from offload.settings import OffloadError  # noqa: E402
from tests.offload_lab import draft_pool, m3_pool, tensors  # noqa: E402

CONNECTOR = inspect.getsource(connector)
CACHE = inspect.getsource(cache)


def test_the_version_is_the_one_the_hooks_were_checked_against() -> None:
    assert version("lmcache") == "0.5.6"


def test_every_hook_resolves_and_says_why() -> None:
    for hook in sglang_plugin.offload_hooks():
        owner, _, name = hook.target.rpartition(".")
        assert callable(getattr(pkgutil.resolve_name(owner), name))
        assert len(hook.reason) > 20


@pytest.mark.parametrize(
    ("source", "line"),
    [
        # The constructor calls these two, in this order, after the tensors are known.
        (CONNECTOR, "self.chunk_size = self._get_chunk_size()"),
        (CONNECTOR, "        self.register_kv_cache()\n"),
        # A lookup without a submission is a miss on all ranks.
        (CONNECTOR, "if operation.submission_future is None:\n                    result = 0"),
        (CONNECTOR, "self._heartbeat_stop = threading.Event()"),
        # Upstream frees the slots of a failed load at once, but only for an Exception.
        (CACHE, "        except Exception:\n            self.token_to_kv_pool_allocator.free(device_indices)"),
        (CACHE, "if not self.lmcache_connector.prepare_load_on_stream("),
        (CACHE, "[pending.operation for pending in self._pending_stores]"),
    ],
)
def test_upstream_still_does_what_we_rely_on(source: str, line: str) -> None:
    assert line in source


@pytest.mark.parametrize(
    ("algorithm", "topk", "seen"), [("EAGLE3", 1, None), ("EAGLE3", 2, "EAGLE3"), ("NGRAM", 1, "NGRAM")]
)
def test_the_refusal_is_lifted_for_a_linear_chain_only(algorithm: str, topk: int, seen: str | None) -> None:
    arguments = SimpleNamespace(
        enable_lmcache=True, speculative_algorithm=algorithm, speculative_eagle_topk=topk, _resolved_overrides=[]
    )

    def original(server_args: Any) -> None:
        declare_resolution(server_args, "another", page_size=128)
        assert resolving_view(server_args).speculative_algorithm == seen
        raise ValueError("another check")

    with pytest.raises(ValueError, match="another check"):
        sglang_lmcache_draft.without_refusal(original, arguments)
    assert resolving_view(arguments).speculative_algorithm == algorithm
    assert resolving_view(arguments).page_size == 128


def test_the_refusal_is_still_there_and_alone() -> None:
    source = inspect.getsource(inspect.unwrap(kv_cache_hook.handle_cache_compatibility))
    assert "LMCacheUnifiedRadixCache does not yet support speculative decoding" in source
    assert source.count("speculative_algorithm") == 1
    pools = inspect.getsource(Scheduler.init_memory_pools)
    assert pools.index("self.draft_worker.alloc_memory_pool(") < pools.index(
        "self.draft_worker.init_hicache_draft_plan("
    )


def test_a_key_of_one_rank_asks_for_its_shard_and_an_answer_comes_once() -> None:
    """What one daemon a rank relies on."""

    def ranks(worker: int | None) -> list[int]:
        key = IPCCacheServerKey(
            model_name="m", world_size=2, worker_id=worker, token_ids=(1,), start=0, end=1, request_id="r"
        )
        return list(_lookup_kv_ranks(key))

    assert ranks(None) == [*ranks(0), *ranks(1)]
    assert "exactly-once" in (LookupModule.query_prefetch_status.__doc__ or "")
    assert "result = self._sync_leader_int(result)" in CONNECTOR


def test_upstream_still_lacks_what_we_add() -> None:
    """A hook whose reason is gone should go too."""
    assert "TODO(chunxiaozheng): support health check" in CONNECTOR
    assert "self.model_name = model_config.model_path" in CONNECTOR
    assert "MiniMax" not in inspect.getsource(pkgutil.resolve_name("lmcache.integration.sglang.unified_kv_adapter"))


def test_a_lookup_is_answered_without_the_tier_which_an_event_tells() -> None:
    """What the module in the daemon is for, and what it listens to."""
    assert inspect.signature(LookupModule.query_prefetch_status).return_annotation == int | None
    found = inspect.getsource(LookupModule._consume_prefetch_result)
    assert "event_type=EventType.MP_LOOKUP_PREFETCH_END,\n                session_id=job.request_id" in found
    assert '"l1_hit_tokens": l1_chunks * self._ctx.chunk_size' in found


def test_a_daemon_refuses_stores_and_loads_of_a_registration_it_does_not_know() -> None:
    """What an earlier registration left in flight must not run after a restart."""
    source = inspect.getsource(LMCacheDrivenTransferModule)
    assert "Rejecting STORE for unregistered" in source
    assert "Rejecting RETRIEVE for unregistered" in source
    assert "unregister" in dir(worker_transfer.LMCacheDrivenTransferContext)


def test_all_planes_of_the_pool_are_found() -> None:
    pool = m3_pool(1024)
    planes = sglang_lmcache_pool.planes_of(pool)
    assert {plane.tensor.data_ptr() for plane in planes} == {tensor.data_ptr() for tensor in tensors(pool)}
    assert len({plane.name for plane in planes}) == len(planes) == 12
    assert planes[0].layout == "K 0 (2, 32) torch.float32"
    mixed = sglang_lmcache_pool.planes_of(m3_pool(1024, torch.float8_e4m3fn, torch.bfloat16))
    assert mixed[0].layout == "K 0 (2, 32) torch.float8_e4m3fn"
    assert mixed[-1].layout == "index-V 0 (1, 32) torch.bfloat16"


def test_a_pool_with_a_tensor_nobody_knows_is_refused() -> None:
    pool = m3_pool(1024)
    pool.index_k_pool.scales = [torch.zeros(1024 + 128, 1)]
    with pytest.raises(OffloadError, match=r"index_k_pool\.scales is a tensor of \(1152, 1\)"):
        sglang_lmcache_pool.planes_of(pool)


def test_a_draft_with_a_tensor_nobody_knows_is_refused(tmp_path: Path) -> None:
    pool = m3_pool(1024)
    draft = draft_pool(1024)
    sglang_lmcache_pool.attach_draft(pool, sglang_lmcache_pool.Draft(draft, tmp_path))
    assert len(sglang_lmcache_pool.planes_of(pool)) == 14
    draft.scales = [torch.zeros(1024 + 128, 1)]
    with pytest.raises(OffloadError, match=r"draft\.scales is a tensor of \(1152, 1\)"):
        sglang_lmcache_pool.planes_of(pool)


def test_a_pool_of_few_pages_and_many_layers_is_known() -> None:
    """SGLang keeps tables of its buffers' addresses, here longer than there are pages."""
    pool = m3_pool(256)
    pool.main_pool._init_data_ptrs_and_strides()
    assert len(pool.main_pool.data_ptrs) == 8 > 256 // 128 + 1
    assert len(sglang_lmcache_pool.planes_of(pool)) == 12


def test_index_keys_that_a_layer_lacks_are_missed() -> None:
    pool = m3_pool(1024)
    pool.index_k_pool.k_buffer = pool.index_k_pool.k_buffer[:1]
    with pytest.raises(OffloadError, match="2 buffers of index keys for 3 layers"):
        sglang_lmcache_pool.planes_of(pool)
    pool.index_k_pool.k_buffer = []
    with pytest.raises(OffloadError, match="no k_buffer: its index-K cannot be offloaded"):
        sglang_lmcache_pool.planes_of(pool)


def test_other_pools_are_refused() -> None:
    common: dict[str, Any] = {"page_size": 128, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    plain = memory_pool.MHATokenToKOnlyPool(size=256, head_num=1, head_dim=8, layer_num=1, **common)
    with pytest.raises(OffloadError, match="this server's pool is a MHATokenToKOnlyPool; leave offload out"):
        sglang_lmcache_pool.planes_of(plain)
