"""What the layers that share a selection really did: counted on the device, published at ``/metrics``.

A CUDA graph replays kernels without running Python, so a Python counter would count captures. Here one small
addition a forward pass runs on the device with the layers it counts, is captured with them and replayed with them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

MODES = ("decode", "extend", "verify")  # extend: prefill, chunked prefill, prefill behind a cached prefix
# Selection computed, selection taken over, producer not run, K and V stored by the kernel that norms them.
EVENTS = ("computed", "reused", "skipped", "stored")

PUBLISH_EVERY_S = 1.0


class PathCounts:
    """Executed events by mode and layer, int64 ``[modes, layers, events]`` on the device.

    Args:
        layers: ids of the layers that can share, ascending.
        device: where they run.
        publish: whether this process publishes (one rank does; all count the same).
    """

    def __init__(self, layers: Sequence[int], device: torch.device | str, *, publish: bool) -> None:
        self.layers = tuple(layers)
        self._place = {layer: place for place, layer in enumerate(self.layers)}
        self._counts = torch.zeros(len(MODES), len(self.layers), len(EVENTS), dtype=torch.int64, device=device)
        self._paths: list[tuple[str, ...]] = [()] * len(self.layers)
        self._additions: dict[tuple[tuple[str, ...], ...], torch.Tensor] = {}
        self._copy = _HostCopy(self._counts)
        self._published = torch.zeros(self._counts.shape, dtype=torch.int64)
        self._next_publication = 0.0
        self._metrics = _metrics() if publish else None

    def passed(self, layer: int, events: tuple[str, ...], mode: str) -> None:
        """A layer did ``events``; at the last layer, all of the pass are added to the counts of ``mode``."""
        self._paths[self._place[layer]] = events
        if layer != self.layers[-1]:
            return
        self._counts[MODES.index(mode)].add_(self.expect(self._paths))
        self._paths = [()] * len(self.layers)

    def expect(self, paths: Sequence[tuple[str, ...]]) -> torch.Tensor:
        """What a pass with these events by layer adds, int64 ``[layers, events]`` on the device.

        Made on first use by a copy to the device, which a capture forbids: call it once before for the usual pass.
        """
        addition = self._additions.get(tuple(paths))
        if addition is None:
            rows = [[int(event in events) for event in EVENTS] for events in paths]
            addition = torch.tensor(rows, dtype=torch.int64, device=self._counts.device)
            self._additions[tuple(paths)] = addition
        return addition

    def publish(self, now: float | None = None) -> None:
        """Publish what was counted, at most once a second and without waiting for the device."""
        if self._metrics is None:
            return
        now = time.monotonic() if now is None else now
        if now < self._next_publication:
            return
        latest = self._copy.take()
        if latest is None:
            return
        self._next_publication = now + PUBLISH_EVERY_S
        for mode, place, event in (latest - self._published).nonzero().tolist():
            growth = int(latest[mode, place, event] - self._published[mode, place, event])
            self._metrics[EVENTS[event]].labels(MODES[mode], str(self.layers[place])).inc(growth)
        self._published = latest


class _HostCopy:
    """The latest copy of a device tensor on the host; asking never waits."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source
        self._on_device = source.is_cuda
        self._started = False
        if self._on_device:
            self._host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self._done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def take(self) -> torch.Tensor | None:
        """What the copy started by an earlier call holds, and start the next one; None while it is under way."""
        if not self._on_device:
            return self._source.clone()
        if self._started and not self._done.query():
            return None
        latest = self._host.clone() if self._started else None
        self._host.copy_(self._source, non_blocking=True)
        self._done.record()
        self._started = True
        return latest


@cache
def _metrics() -> dict[str, Any]:
    """One Prometheus counter an event. Imported late: SGLang first names the folder its processes share."""
    from prometheus_client import Counter

    texts = {
        "computed": ("agentserve_index_selections_computed", "Block selections computed, one a layer and pass."),
        "reused": ("agentserve_index_selections_reused", "Block selections taken over from an earlier layer."),
        "skipped": ("agentserve_index_producers_skipped", "Index projections, norms, RoPE and stores not run."),
        "stored": ("agentserve_index_fused_stores", "K and V stored by the kernel that also norms and rotates."),
    }
    return {event: Counter(name, text, ["mode", "layer"]) for event, (name, text) in texts.items()}
