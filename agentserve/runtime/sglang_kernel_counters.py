"""Notes which kernels SGLang calls for M3's sparse layers. Checked against sglang 0.5.23.

A kernel that gives up (``MSAUnavailableError`` and the like) raises and is not noted; the one that SGLang falls back to
is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_observability, get_parallel

from agentserve.runtime import sglang_msa
from agentserve.runtime.device_counts import mode_of
from agentserve.runtime.kernel_counters import KernelCounts

_counts: KernelCounts | None = None  # of this process's model


def start(result: None, self: Any, runner: Any) -> None:
    """AFTER ``MiniMaxSparseAttnBackend.__init__``."""
    global _counts
    publish = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
    _counts = KernelCounts(sorted(self.sparse_layer_ids), self.kv_pool.device, publish=publish)


def publish(result: None, self: Any, forward_batch: Any, in_capture: bool = False) -> None:
    """AFTER ``MiniMaxSparseAttnBackend.init_forward_metadata_out_graph``, which every pass begins with."""
    if _counts is not None and not in_capture:
        _counts.publish()


def count_pass(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """AROUND ``MiniMaxSparseAttnBackend.forward``, once a layer and pass."""
    if _counts is None or forward_batch.forward_mode.is_idle():
        return original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    _counts.before_layer(layer.layer_id)
    by_torch = sglang_msa.executed.total()
    result = original(self, q, k, v, layer, forward_batch, *args, **kwargs)
    if sglang_msa.executed.total() > by_torch:
        _counts.attended("torch")
    _counts.after_layer(layer.layer_id, mode_of(forward_batch.forward_mode))
    return result


def noting(kernel: str) -> Callable[..., Any]:
    """AROUND a function that runs a kernel: note it once it has."""

    def note(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _counts is not None:
            _counts.attended(kernel)
        return result

    return note


def note_reduction(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``QuickAllReduce.quick_all_reduce``, which is called for messages that it takes only."""
    result = original(self, *args, **kwargs)
    if _counts is not None and self.qr_quant_level.name != "FP":  # FP sends 16 bits
        _counts.reduced()
    return result
