"""Norm, RoPE and KV store of a reusing layer in one kernel on CUDA. Checked against sglang 0.5.23.

A layer with an indexer hands q, k, v and its index keys through two kernels of SGLang: norm and RoPE of all heads,
then a store of K, V and index K. A layer that takes over a selection has only q, k and v, and for these one kernel
does both. SGLang does the like for sparse layers on ROCm; its mark for "already stored"
(``minimax_m3_precached_sparse_layers``) is used here, so its attention is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.kernels.jit.utils import is_arch_support_pdl
from sglang.srt.model_executor.forward_context import get_forward_context, has_forward_context

from agentserve.runtime.sglang_index_reuse import SharingSparseAttnBackend
from agentserve.runtime.triton_fused_store import HEAD_DIM, norm_rope_store

# Of tokens in a pass. A decode step gains by a launch less (1.8 and 2.4 us to 1.0 and 1.1 us for 1 and 8 tokens on an
# H200); a prefill chunk would lose by narrow loads (59 us to 90 us for 4,096).
MOST_ROWS = 64


def fused_store_applies(layer: Any, pool: Any, forward_batch: Any, rows: int) -> bool:
    """Whether a reusing layer's forward pass can take the kernel; if not, SGLang's two kernels do the same.

    Args:
        layer: a ``MiniMaxM3Attention``.
        pool: the ``MiniMaxSparseKVPool``.
        forward_batch: of this pass.
        rows: tokens in it, padding included.
    """
    slots = getattr(forward_batch, "out_cache_loc", None)
    k_cache = pool.get_kv_buffer(layer.attn.layer_id)[0]
    return (
        rows <= MOST_ROWS
        and layer._use_fused_qknorm_rope  # on CUDA, with the sizes of M3's heads
        and layer.rotary_emb.cos_sin_cache.dtype == torch.float32
        and k_cache.dtype == layer.q_norm.weight.dtype
        and k_cache.stride()[1:] == (HEAD_DIM, 1)
        and layer.q_norm.variance_epsilon == layer.k_norm.variance_epsilon
        and slots is not None
        and slots.shape[0] == rows
    )


def prepare_and_store(
    original: Callable[..., Any], self: Any, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
) -> Any:
    """AROUND ``MiniMaxM3Attention.forward_prepare``: a reusing layer's norm, RoPE and store in one kernel."""
    backend = getattr(get_forward_context().attn_backend, "sparse", None) if has_forward_context() else None
    layer_id = self.attn.layer_id
    if (
        not isinstance(backend, SharingSparseAttnBackend)
        or not backend.skips_producer(layer_id)
        or forward_batch.forward_mode.is_idle()
        or not fused_store_applies(self, backend.kv_pool, forward_batch, hidden_states.shape[0])
    ):
        return original(self, positions, hidden_states, forward_batch)
    qkv, _ = self.qkv_proj(hidden_states)
    k_cache, v_cache = backend.kv_pool.get_kv_buffer(layer_id)
    q = norm_rope_store(
        qkv, self.q_norm.weight, self.k_norm.weight, self.rotary_emb.cos_sin_cache, positions,
        forward_batch.out_cache_loc, k_cache, v_cache, eps=self.q_norm.variance_epsilon, pdl=is_arch_support_pdl(),
    )  # fmt: skip
    self._mark_sparse_kv_cached_by_fusion(forward_batch, layer_id)
    # K here is not normed: it is in its slots already, where attention reads it.
    _, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
    return None, forward_batch, (q, k, v, forward_batch)
