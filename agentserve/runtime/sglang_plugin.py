"""Entry point ``sglang.srt.plugins``: every hook we put into SGLang, in one table.

SGLang is never edited. Each row names its target, why it is needed, and the version it was checked against;
``tests/test_sglang_hooks.py`` fails when a target moves or changes its signature.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from agentserve.runtime import index_reuse, policy_settings, server_facts, sglang_cpu_platform, speculation
from agentserve.watch import settings as watch_settings
from offload import settings as offload_settings

CHECKED_VERSION = "0.5.23"


class Hook(NamedTuple):
    """One seam in SGLang."""

    target: str  # dotted path of the function that is hooked
    kind: str  # SGLang's HookType: before, after, around, replace
    function: Callable[..., Any]
    reason: str


def cpu_hooks() -> tuple[Hook, ...]:
    """Hooks of the CPU platform; none is registered on a GPU."""
    from agentserve.runtime import sglang_cpu_hooks, sglang_msa

    sparse_ops = "sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse"
    return (
        Hook(
            f"{sparse_ops}.minimax_sparse_prefill",
            "replace",
            sglang_msa.prefill,
            "the sparse attention exists as Triton kernels only",
        ),
        Hook(
            f"{sparse_ops}.minimax_sparse_decode",
            "replace",
            sglang_msa.decode,
            "the sparse attention exists as Triton kernels only",
        ),
        Hook(
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
            "around",
            sglang_cpu_hooks.build_sparse_kv_pool,
            "out-of-tree platforms are refused the M3 pool, though it is plain torch",
        ),
        Hook(
            "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
            "around",
            sglang_cpu_hooks.moe_with_split_gate,
            "the native MoE applies the interleaved SwiGLU to M3's non-interleaved gate and up: silently wrong",
        ),
        Hook(
            "sglang.srt.models.minimax_m3.MiniMaxM3MoE._compute_router_logits",
            "around",
            sglang_cpu_hooks.router_logits,
            "mm(out_dtype=) of the bf16 router is implemented for CUDA only",
        ),
    )


def policy_hooks() -> tuple[Hook, ...]:
    """Hooks of the live policies; none is registered unless a policy was asked for."""
    from agentserve.runtime import sglang_radix_cache
    from agentserve.runtime.policy_journal import JOURNAL_VARIABLE

    journal = Hook(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        "around",
        sglang_radix_cache.journal_decode,
        "the policy journal says which requests a decode step made room for; SGLang tells the cache only of shortages",
    )
    return (
        *((journal,) if os.environ.get(JOURNAL_VARIABLE) else ()),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
            "around",
            sglang_radix_cache.prefill_of_admitted,
            "sets the cache's clock at each scheduler step and keeps requests that admission holds out of the batch",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.close_session",
            "around",
            sglang_radix_cache.close_known_session,
            "POST /close_session reaches the scheduler, which knows no session that was never opened",
        ),
    )


def index_reuse_hooks(reuse: index_reuse.IndexReuse) -> tuple[Hook, ...]:
    """Hooks of index reuse; none is registered unless it was asked for."""
    from agentserve.runtime import sglang_fused_store, sglang_index_reuse, sglang_kv_pool

    share = Hook(
        "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend",
        "replace",
        sglang_index_reuse.SharingSparseAttnBackend,
        "the backend shares selections on ROCm only, in groups of one size, and wants index inputs in every layer",
    )
    if reuse.keep_producers:
        return (share,)
    models = "sglang.srt.models"
    fused = Hook(
        f"{models}.minimax_m3.MiniMaxM3Attention.forward_prepare",
        "around",
        sglang_fused_store.prepare_and_store,
        "norms, rotates and stores K and V in two kernels on CUDA, where a layer without index keys needs one",
    )
    return (
        share,
        *(() if reuse.separate_store else (fused,)),
        Hook(
            f"{models}.minimax_m3.MiniMaxM3Attention.__init__",
            "before",
            sglang_index_reuse.attention_without_indexer,
            "every sparse layer is built with an indexer, though a reusing one needs none",
        ),
        Hook(
            f"{models}.minimax_m3.MiniMaxM3SparseForCausalLM.load_weights",
            "around",
            sglang_index_reuse.weights_of_sources,
            "warns of every index weight of a layer without an indexer",
        ),
        Hook(
            f"{models}.minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration.load_weights",
            "around",
            sglang_index_reuse.weights_of_sources,
            "warns of every index weight of a layer without an indexer",
        ),
        Hook(
            "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool",
            "replace",
            sglang_kv_pool.SourceIndexKVPool,
            "the pool allocates index keys for every sparse layer",
        ),
        Hook(
            "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
            "after",
            sglang_kv_pool.cell_size_of_sources,
            "the token capacity is computed from index keys in every sparse layer",
        ),
    )


def eagle3_hooks() -> tuple[Hook, ...]:
    """Hooks of EAGLE3 on any device; none is registered unless it was asked for."""
    from agentserve.runtime import sglang_eagle3

    return (
        Hook(
            "sglang.srt.mem_cache.registry.create_tree_cache",
            "around",
            sglang_eagle3.cache_by_tokens,
            "keys of token pairs lose one page of every prefix that ends on a page",
        ),
        Hook(
            "sglang.srt.managers.scheduler_components.batch_result_processor."
            "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            "around",
            sglang_eagle3.count_accepted,
            "SGLang's metrics have no acceptance by position",
        ),
        Hook(
            "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.__init__",
            "after",
            sglang_eagle3.verify_as_rows,
            "the verification of a chain is enabled on ROCm only, though it is the device-independent decode",
        ),
        Hook(
            "sglang.srt.model_executor.model_runner_components.attention_backend_setup."
            "configure_aux_hidden_state_capture",
            "before",
            sglang_eagle3.capture_layers,
            "where the draft's config names no layers, SGLang guesses some",
        ),
    )


def eagle3_cpu_hooks() -> tuple[Hook, ...]:
    """What EAGLE3 needs on top on a CPU."""
    from agentserve.runtime import sglang_eagle3_attention, sglang_eagle3_kernels

    kernels = "sglang.kernels.ops.speculative"
    triton = "it exists as a Triton kernel only"
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    return (
        Hook(
            f"{kernels}.cache_locs.assign_draft_cache_locs_contiguous_func",
            "replace",
            sglang_eagle3_kernels.draft_cache_locs,
            triton,
        ),
        Hook(
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            "replace",
            sglang_eagle3_kernels.assign_req_to_token,
            triton,
        ),
        Hook(
            f"{kernels}.spec_tree.build_tree_kernel_efficient_func",
            "replace",
            sglang_eagle3_kernels.build_chain,
            triton,
        ),
        Hook(f"{kernels}.spec_tree.verify_tree_greedy_func", "replace", sglang_eagle3_kernels.verify_chain, triton),
        Hook(f"{kernels}.eagle.fill_bonus_tokens_func", "replace", sglang_eagle3_kernels.fill_bonus_tokens, triton),
        Hook(
            "sglang.srt.speculative.eagle_utils._verify_uses_greedy",
            "replace",
            sglang_eagle3_kernels.verify_greedily,
            "a batch with a temperature would run Triton kernels; on its own CPU engine SGLang verifies greedily",
        ),
        Hook(
            f"{factory}.create_decode_backend",
            "around",
            sglang_eagle3_attention.draft_decode_backend,
            "no torch backend is in the table of draft backends",
        ),
        Hook(
            f"{factory}.create_draft_extend_backend",
            "around",
            sglang_eagle3_attention.draft_extend_backend,
            "no torch backend is in the table of draft backends",
        ),
    )


def offload_hooks() -> tuple[Hook, ...]:
    """Hooks of offloading to LMCache (checked against 0.5.6); none is registered unless it was asked for."""
    from agentserve.runtime import (
        sglang_lmcache_cache,
        sglang_lmcache_connector,
        sglang_lmcache_draft,
        sglang_lmcache_pool,
    )

    lmcache = "lmcache.integration.sglang"
    drafting = (
        Hook(
            "sglang.srt.arg_groups.kv_cache_hook.handle_cache_compatibility",
            "around",
            sglang_lmcache_draft.without_refusal,
            "refuses LMCache with any speculation, since the draft's K and V would not be restored",
        ),
        Hook(
            "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_hicache_draft_plan",
            "after",
            sglang_lmcache_draft.note_draft_pool,
            "the connector is handed the target's pool only",
        ),
    )
    return (
        *(drafting if speculation.settings_from() is not None else ()),
        Hook(
            f"{lmcache}.unified_kv_adapter.SGLangUnifiedKVAdapter._resolve_pool_tensors",
            "around",
            sglang_lmcache_pool.pool_tensors,
            "knows no M3 pool, and hands views to what moves tensors to shared memory on a CPU",
        ),
        Hook(
            f"{lmcache}.unified_kv_adapter.SGLangUnifiedKVAdapter._resolve_dsa_indexer_tensors",
            "around",
            sglang_lmcache_pool.page_tensors,
            "pages carry no checksum of what they hold",
        ),
        Hook(
            f"{lmcache}.unified_lmcache_mp_connector.UnifiedLMCacheMPConnector",
            "replace",
            sglang_lmcache_connector.GuardedConnector,
            "waits for the daemon without limit, registers once, and keys name a path instead of weights",
        ),
        Hook(
            "sglang.srt.mem_cache.storage.lmcache.lmcache_unified_radix_cache.LMCacheUnifiedRadixCache",
            "replace",
            sglang_lmcache_cache.GuardedRadixCache,
            "frees the slots of an abandoned load while a late daemon may still write to them",
        ),
    )


def fact_hooks() -> tuple[Hook, ...]:
    """What tells clients why the offload tier or admission kept a hit from a request."""
    from agentserve.runtime import sglang_request_facts

    return (
        Hook(
            "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
            "replace",
            sglang_request_facts.FactsOutputStreamer,
            "answers tell how many tokens were hit, but not why others were not restored or how long admission held",
        ),
    )


def offloading() -> bool:
    """Whether this process offloads to LMCache."""
    return offload_settings.settings_from() is not None


def watch_hooks() -> tuple[Hook, ...]:
    """Hooks of the watch page; none is registered unless it was asked for."""
    from agentserve.runtime import sglang_watch_route, sglang_watch_state

    return (
        Hook(
            "sglang.srt.utils.common.add_prometheus_middleware",
            "after",
            sglang_watch_route.add_page,
            "the HTTP server has no extension point for routes; this is called with its application",
        ),
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
            "after",
            sglang_watch_state.after_prefill_batch,
            "no counter of SGLang tells a prompt token that was never seen from one that was lost",
        ),
    )


def server_fact_hooks() -> tuple[Hook, ...]:
    """What tells clients which paths a server can run; none is registered unless agentserve launched it."""
    from agentserve.runtime import sglang_server_facts

    return (
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.get_init_info",
            "after",
            sglang_server_facts.tell,
            "/server_info names neither the environment nor the GPU, which decide what runs",
        ),
    )


def kernel_hooks() -> tuple[Hook, ...]:
    """What counts the kernels that run; none is registered unless agentserve launched the server."""
    from agentserve.runtime import sglang_kernel_counters as counters

    backend = "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend"
    passes = (
        Hook(f"{backend}.__init__", "after", counters.start, "SGLang counts passes, and not which kernel ran in them"),
        Hook(
            f"{backend}.init_forward_metadata_out_graph",
            "after",
            counters.publish,
            "the one function that runs before each pass, a replayed CUDA graph included",
        ),
        Hook(f"{backend}.forward", "around", counters.count_pass, "knows the layer, and so where a pass ends"),
    )
    return passes if sglang_cpu_platform.selected() else (*passes, *_gpu_kernel_hooks())


def _gpu_kernel_hooks() -> tuple[Hook, ...]:
    """Functions that run a kernel on a GPU; each make has some of its own."""
    import torch

    from agentserve.runtime import sglang_kernel_counters as counters

    attention = "sglang.srt.layers.attention"
    ops = f"{attention}.minimax_sparse_ops"
    log_only = "the log says at the start which kernel is meant to run, and once that one gave up"
    aiter = "sglang.kernels.ops.attention.minimax_sparse.prefill.gluon_prefill.gluon_sparse_prefill"
    reduce = "sglang.srt.distributed.device_communicators.quick_all_reduce.QuickAllReduce.quick_all_reduce"
    kernels = {
        "triton": [f"{ops}.minimax_sparse.flash_{phase}_with_gqa_share_sparse" for phase in ("prefill", "decode")],
        "msa": [f"{ops}.msa.msa_sparse_{phase}_main" for phase in ("prefill", "decode")],
        "trtllm": [f"{attention}.minimax_sparse_backend.MiniMaxSparseAttnBackend._dense_sparse_main_decode"],
        "aiter": [aiter],
    }
    here = ("triton", "aiter") if torch.version.hip else ("triton", "msa", "trtllm")
    noted = tuple(
        Hook(target, "around", counters.noting(kernel), log_only) for kernel in here for target in kernels[kernel]
    )
    if not torch.version.hip:
        return noted
    return (*noted, Hook(reduce, "around", counters.note_reduction, "nothing tells which messages it took"))


def active_hooks() -> tuple[Hook, ...]:
    """The hooks that this process must have in place."""
    cpu, eagle3 = sglang_cpu_platform.selected(), speculation.settings_from() is not None
    facts = policy_settings.settings_from() is not None or offload_settings.settings_from() is not None
    return (
        *(fact_hooks() if facts else ()),
        *(kernel_hooks() if server_facts.asked_for() else ()),
        *(cpu_hooks() if cpu else ()),
        *(eagle3_hooks() if eagle3 else ()),
        *(eagle3_cpu_hooks() if cpu and eagle3 else ()),
    )


def register() -> None:
    """Called by SGLang early in each of its processes."""
    reuse = index_reuse.settings_from()
    if reuse is not None:
        _register_hooks(index_reuse_hooks(reuse))
    settings = policy_settings.settings_from()
    if settings is not None:
        from agentserve.runtime import sglang_radix_cache

        sglang_radix_cache.register_backend(settings)
        _register_hooks(policy_hooks())
    if offload_settings.settings_from() is not None:
        _register_hooks(offload_hooks())
    if watch_settings.asked_for():
        _register_hooks(watch_hooks())
    if server_facts.asked_for():
        _register_hooks(server_fact_hooks())
    if sglang_cpu_platform.selected():
        sglang_cpu_platform.activate()
    _register_hooks(active_hooks())
    if not sglang_cpu_platform.selected():
        return

    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend("torch_native")
    def _dense_torch(runner: Any) -> Any:
        if speculation.settings_from() is not None:
            from agentserve.runtime.sglang_eagle3_attention import ChainDenseBackend

            return ChainDenseBackend(runner)
        from agentserve.runtime.sglang_dense import DenseTorchAttnBackend

        return DenseTorchAttnBackend(runner)


def _register_hooks(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def require_applied(hooks: tuple[Hook, ...] | None = None) -> None:
    """Raise unless every hook, by default every active one, is in place in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = active_hooks() if hooks is None else hooks
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"agentserve's hooks are not in place: {', '.join(missing)}. They were checked against sglang "
            f"{CHECKED_VERSION}; install that version, or see the log above for why a hook failed"
        )
