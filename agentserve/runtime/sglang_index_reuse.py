"""Layers that take over another layer's block selection, inside SGLang's M3. Checked against sglang 0.5.23.

SGLang's sparse attention can be given a selection (``cached_topk_idx``) and its backend can keep one for the layers
after; only ROCm switches that on. Here it is switched on elsewhere, and a reusing layer is built as a layer without
an indexer: the model then takes its own dense branch (projections, norm, RoPE of q, k and v only), and this backend
attends sparsely all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxSparseAttnBackend
from sglang.srt.layers.moe.utils import is_tbo_enabled
from sglang.srt.runtime_context import get_observability, get_parallel

from agentserve.runtime.device_counts import mode_of
from agentserve.runtime.index_reuse import IndexReuseError, required_settings
from agentserve.runtime.index_reuse_counters import PathCounts
from agentserve.runtime.sglang_kv_pool import model_pattern

_INDEX_WEIGHT = re.compile(r"\blayers\.(\d+)\.self_attn\.index_")
_COMPUTED, _REUSED, _REUSED_AND_SKIPPED = ("computed",), ("reused",), ("reused", "skipped")
_AND_STORED = (*_REUSED_AND_SKIPPED, "stored")


def attention_without_indexer(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """BEFORE ``MiniMaxM3Attention.__init__``: a reusing layer gets no index projections, norms or weights."""
    quant_config = kwargs.get("quant_config")
    if quant_config is not None and quant_config.get_name() == "minimax_m3_nvfp4":
        raise IndexReuseError("index reuse does not run with NVFP4 checkpoints, whose K and index keys share rows")
    # The config is the text model's here; the functions that read it take both.
    if kwargs["layer_id"] in model_pattern(kwargs["config"]).reusers:
        kwargs["is_sparse_attention_layer"] = False
    return args, kwargs


def weights_of_sources(original: Callable[..., Any], self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
    """AROUND ``load_weights``: leave out index weights that no layer has a place for; SGLang warns of each."""
    reusers = set(model_pattern(self.config).reusers)

    def kept(name: str) -> bool:
        match = _INDEX_WEIGHT.search(name)
        return match is None or int(match[1]) not in reusers

    return original(self, ((name, tensor) for name, tensor in weights if kept(name)))


class SharingSparseAttnBackend(MiniMaxSparseAttnBackend):
    """``MiniMaxSparseAttnBackend`` in which sources choose blocks for the layers after them.

    Raises:
        IndexReuseError: the server runs with something that sharing does not know.
    """

    def __init__(self, runner: Any) -> None:
        from agentserve.runtime.sglang_plugin import index_reuse_hooks, require_applied

        reuse = required_settings()
        require_applied(index_reuse_hooks(reuse))
        if is_tbo_enabled():
            raise IndexReuseError("index reuse does not run with two-batch overlap, whose halves interleave layers")
        if get_parallel().pp_size > 1:
            raise IndexReuseError("index reuse does not run with pipeline parallelism: a source may be elsewhere")
        super().__init__(runner)
        hf_config = runner.model_config.hf_config
        pattern = model_pattern(hf_config)
        self._skip_producers = not reuse.keep_producers
        self._source_of = dict(pattern.source_of)

        # What upstream's __init__ would have set on ROCm, with our pattern in place of its groups of equal size.
        self.index_cache_enabled = True
        self.index_topk_freq = max(list(self._source_of.values()).count(source) for source in pattern.sources)
        self._topk_group_of_layer = dict(self._source_of)
        self._topk_is_source = {layer: layer == source for layer, source in self._source_of.items()}
        text_config = getattr(hf_config, "text_config", None) or hf_config
        index_heads = text_config.sparse_attention_config["sparse_num_index_heads"]
        self._index_heads = max(index_heads // get_parallel().attn_tp_size, 1)
        self._idx_group_size = max(self._index_heads // self.kv_pool.main_pool.head_num, 1)
        # The dense decode over a compact page table cannot be given a selection.
        self.use_dense_sparse_decode = False
        self._msa_owns_decode = self._use_msa_decode

        publish = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
        self.path_counts = PathCounts(list(self._source_of), self.kv_pool.device, publish=publish)
        for takes_over in (_REUSED_AND_SKIPPED, _AND_STORED) if self._skip_producers else (_REUSED,):
            self.path_counts.expect([_COMPUTED if own else takes_over for own in self._topk_is_source.values()])

    def skips_producer(self, layer: int) -> bool:
        """Whether a layer makes nothing but q, k and v, though it attends sparsely."""
        return self._skip_producers and self._source_of.get(layer, layer) != layer

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if not in_capture:
            self.path_counts.publish()

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, and for a reusing layer without index inputs: attention only, as a dense layer returns it."""
        source = self._source_of.get(layer.layer_id)
        if source is None:
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        idle = forward_batch.forward_mode.is_idle()
        if source == layer.layer_id:
            result = super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if not idle:
                self._count(layer.layer_id, _COMPUTED, forward_batch)
            return result
        if not self._skip_producers:
            shared = not idle and self._has_selection(source, forward_batch, q.shape[0])
            result = super().forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            if not idle:
                self._count(layer.layer_id, _REUSED if shared else _COMPUTED, forward_batch)
            return result
        if not idle and not self._has_selection(source, forward_batch, q.shape[0]):
            # Upstream would compute one here, from index keys that this layer does not own.
            raise RuntimeError(
                f"layer {layer.layer_id} has no selection of layer {source} in a {forward_batch.forward_mode.name} "
                f"pass of {q.shape[0]} rows; start without index reuse and report this"
            )
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        # Only its head count is read. No rows: nothing to compute, and nothing that could be used by mistake.
        no_index_queries = q.new_empty((0, self._index_heads, self.idx_head_dim))
        _, out = super().forward(
            q, k, v, layer, forward_batch, save_kv_cache, idx_q=no_index_queries, idx_k=None, idx_v=None
        )
        if not idle:
            stored = self._is_sparse_kv_cached_by_fusion(forward_batch, layer.layer_id)
            self._count(layer.layer_id, _AND_STORED if stored else _REUSED_AND_SKIPPED, forward_batch)
        return out

    def _has_selection(self, source: int, forward_batch: Any, rows: int) -> bool:
        mode = forward_batch.forward_mode
        if mode.is_decode() or (self.is_hip and mode.is_target_verify()):
            return rows in self._decode_topk_buf
        return self._topk_cache_owner is forward_batch and source in self._topk_cache

    def _count(self, layer: int, events: tuple[str, ...], forward_batch: Any) -> None:
        self.path_counts.passed(layer, events, mode_of(forward_batch.forward_mode))
