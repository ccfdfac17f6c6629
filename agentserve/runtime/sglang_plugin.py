"""Entry point ``sglang.srt.plugins``: every hook we put into SGLang, in one table.

SGLang is never edited. Each row names its target, why it is needed, and the version it was checked against;
``tests/test_sglang_hooks.py`` fails when a target moves or changes its signature.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from agentserve.runtime import index_reuse, policy_settings, sglang_cpu_platform

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

    return (
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
    from agentserve.runtime import sglang_index_reuse, sglang_kv_pool

    share = Hook(
        "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend",
        "replace",
        sglang_index_reuse.SharingSparseAttnBackend,
        "the backend shares selections on ROCm only, in groups of one size, and wants index inputs in every layer",
    )
    if reuse.keep_producers:
        return (share,)
    models = "sglang.srt.models"
    return (
        share,
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
    if not sglang_cpu_platform.selected():
        return
    sglang_cpu_platform.activate()
    _register_hooks(cpu_hooks())

    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    @register_attention_backend("torch_native")
    def _dense_torch(runner: Any) -> Any:
        from agentserve.runtime.sglang_dense import DenseTorchAttnBackend

        return DenseTorchAttnBackend(runner)


def _register_hooks(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def require_applied(hooks: tuple[Hook, ...] | None = None) -> None:
    """Raise unless every hook, by default every CPU hook, is in place in this process."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks = cpu_hooks() if hooks is None else hooks
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise RuntimeError(
            f"agentserve's hooks are not in place: {', '.join(missing)}. They were checked against sglang "
            f"{CHECKED_VERSION}; install that version, or see the log above for why a hook failed"
        )
