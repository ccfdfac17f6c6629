"""KV memory where only sources own index keys: the pool, and how many tokens fit. Checked against sglang 0.5.23."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import (
    get_minimax_sparse_attention_config,
    get_minimax_sparse_disable_value_layer_ids,
    get_minimax_sparse_layer_ids,
    is_minimax_sparse,
)
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKOnlyPool,
    MiniMaxSparseKVPool,
    get_minimax_sparse_index_dtype,
)
from sglang.srt.server_args import m3_fp8_attn_gemm_enabled

from agentserve.runtime.index_reuse import IndexReuseError, ReusePattern, required_settings


class SourceIndexKVPool(MiniMaxSparseKVPool):
    """``MiniMaxSparseKVPool`` whose reusing layers have K and V and no index keys.

    Takes upstream's arguments, by keyword as upstream gives them.
    """

    def __init__(self, **kwargs: Any) -> None:
        if kwargs.get("enable_hisparse"):
            raise IndexReuseError(
                "index reuse does not run with HiSparse, which swaps blocks by layer; leave one of them out"
            )
        here = range(kwargs["start_layer"], kwargs["end_layer"])
        without_value = set(kwargs.get("disable_value_sparse_layer_ids") or ())
        pattern = required_settings().pattern([layer for layer in kwargs["sparse_layer_ids"] if layer in without_value])
        sources = [layer for layer in pattern.sources if layer in here]
        self._reusers = frozenset(pattern.reusers)

        def pool_of_sources(**pool: Any) -> Any:
            return MHATokenToKOnlyPool(**{**pool, "layer_num": len(sources)})

        super().__init__(**kwargs, index_k_pool_cls=pool_of_sources)
        # Whoever copies, offloads or transfers index keys asks this mapping which layers have some.
        self.index_k_layer_id_mapping = {layer: place for place, layer in enumerate(sources)}

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        if layer_id in self._reusers:
            # The backend asks before it knows that it will not read; no rows, so that reading fails.
            return self.index_k_pool.k_buffer[0][:0]
        return super().get_index_k_buffer(layer_id)

    def set_fused_kv_index_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        cache_idx_k: torch.Tensor | None,
        cache_idx_v: torch.Tensor | None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        idx_k_scale: float | None = None,
        idx_v_scale: float | None = None,
    ) -> None:
        if layer.layer_id in self._reusers:
            self.set_kv_buffer(layer, loc, cache_k, cache_v, k_scale, v_scale)
            return
        super().set_fused_kv_index_buffer(
            layer, loc, cache_k, cache_v, cache_idx_k, cache_idx_v, k_scale, v_scale, idx_k_scale, idx_v_scale
        )


def cell_size_of_sources(result: int, self: Any, kvc: Any, num_layers: int) -> int:
    """AFTER ``DefaultPoolConfigurator._compute_cell_size``: bytes per token without the reusers' index keys."""
    hf_config = kvc.model_config.hf_config
    if not is_minimax_sparse(hf_config):
        return result  # a speculative draft's pool
    sparse = get_minimax_sparse_attention_config(hf_config)
    pattern = model_pattern(hf_config)
    here = range(kvc.layer_info.start_layer, kvc.layer_info.end_layer)
    index_dtype = get_minimax_sparse_index_dtype(
        fp8_attn_gemm=m3_fp8_attn_gemm_enabled(resolving_view(kvc.server_args)),
        kv_cache_dtype=kvc.kv_cache_dtype,
        model_dtype=kvc.model_dtype,
    )
    reusers = sum(layer in here for layer in pattern.reusers)
    return result - reusers * sparse["sparse_index_dim"] * index_dtype.itemsize


def model_pattern(hf_config: Any) -> ReusePattern:
    """The pattern of this process's settings for a model, from its config (with or without a text level)."""
    sparse = get_minimax_sparse_attention_config(hf_config)
    _, sparse_layers = get_minimax_sparse_layer_ids(sparse)
    without_value = set(get_minimax_sparse_disable_value_layer_ids(sparse))
    return required_settings().pattern([layer for layer in sparse_layers if layer in without_value])
