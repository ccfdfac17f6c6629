"""Which kernel attended in M3's sparse layers, and whether all-reduces were quantized: passes, at ``/metrics``.

What is called is noted in Python; the note is added to a count on the device at the last sparse layer of a pass, so
that a CUDA graph replays the addition with the kernels that it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from agentserve.runtime.device_counts import MODES, DeviceCounts

# AITER's paged attention, NVIDIA's fmha_sm100, TRT-LLM's paged attention, SGLang's own kernels, ours on a CPU.
KERNELS = ("aiter", "msa", "trtllm", "triton", "torch")
_QUICK_REDUCE = "quick_reduce"
_EVENTS = (*KERNELS, _QUICK_REDUCE)


class KernelCounts:
    """Passes by mode and by what ran in them, int64 ``[modes, events]`` on the device.

    Args:
        layers: ids of the sparse layers, ascending.
        device: where they run.
        publish: whether this process publishes (one rank does; all count the same).
    """

    def __init__(self, layers: Sequence[int], device: torch.device | str, *, publish: bool) -> None:
        self._first, self._last = layers[0], layers[-1]
        self._kernel: str | None = None
        self._reduced = False
        self._counts = DeviceCounts((len(MODES), len(_EVENTS)), device, self._grew if publish else None)
        if publish:
            _metrics()  # named from the start

    def attended(self, kernel: str) -> None:
        """``kernel``, one of ``KERNELS``, attended in a layer."""
        self._kernel = kernel

    def reduced(self) -> None:
        """QuickReduce took an all-reduce."""
        self._reduced = True

    def before_layer(self, layer: int) -> None:
        """A pass begins with its first sparse layer: what layers behind the last one did belongs to the pass before."""
        if layer == self._first:
            self._kernel, self._reduced = None, False

    def after_layer(self, layer: int, mode: str) -> None:
        """Count the pass at its last sparse layer. All layers of a pass take one kernel: they have the same shapes."""
        if layer != self._last:
            return
        counts = self._counts.values[MODES.index(mode)]
        if self._kernel is not None:
            counts[_EVENTS.index(self._kernel)].add_(1)
        if self._reduced:
            counts[_EVENTS.index(_QUICK_REDUCE)].add_(1)

    def publish(self, now: float | None = None) -> None:
        """Publish what was counted, at most once a second and without waiting for the device."""
        self._counts.publish(now)

    def _grew(self, place: tuple[int, ...], growth: int) -> None:
        mode, event = MODES[place[0]], _EVENTS[place[1]]
        passes, reduced = _metrics()
        (reduced.labels(mode) if event == _QUICK_REDUCE else passes.labels(event, mode)).inc(growth)


@cache
def _metrics() -> tuple[Any, Any]:
    """The Prometheus counters. Imported late: SGLang first names the folder its processes share."""
    from prometheus_client import Counter

    return (
        Counter(
            "agentserve_sparse_attention_passes",
            "Forward passes, by the kernel that attended in the sparse layers.",
            ["kernel", "mode"],
        ),
        Counter("agentserve_quick_reduce_passes", "Forward passes whose all-reduces QuickReduce took.", ["mode"]),
    )
