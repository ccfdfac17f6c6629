"""What the layers that share a selection really did: counted on the device, published at ``/metrics``.

One small addition a forward pass runs on the device with the layers it counts (``device_counts`` says why).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from agentserve.runtime.device_counts import MODES, DeviceCounts

# Selection computed, selection taken over, producer not run, K and V stored by the kernel that norms them.
EVENTS = ("computed", "reused", "skipped", "stored")


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
        self._paths: list[tuple[str, ...]] = [()] * len(self.layers)
        self._additions: dict[tuple[tuple[str, ...], ...], torch.Tensor] = {}
        shape = (len(MODES), len(self.layers), len(EVENTS))
        self._counts = DeviceCounts(shape, device, self._grew if publish else None)
        if publish:
            _metrics()  # named from the start

    def passed(self, layer: int, events: tuple[str, ...], mode: str) -> None:
        """A layer did ``events``; at the last layer, all of the pass are added to the counts of ``mode``."""
        self._paths[self._place[layer]] = events
        if layer != self.layers[-1]:
            return
        self._counts.values[MODES.index(mode)].add_(self.expect(self._paths))
        self._paths = [()] * len(self.layers)

    def expect(self, paths: Sequence[tuple[str, ...]]) -> torch.Tensor:
        """What a pass with these events by layer adds, int64 ``[layers, events]`` on the device.

        Made on first use by a copy to the device, which a capture forbids: call it once before for the usual pass.
        """
        addition = self._additions.get(tuple(paths))
        if addition is None:
            rows = [[int(event in events) for event in EVENTS] for events in paths]
            addition = torch.tensor(rows, dtype=torch.int64, device=self._counts.values.device)
            self._additions[tuple(paths)] = addition
        return addition

    def publish(self, now: float | None = None) -> None:
        """Publish what was counted, at most once a second and without waiting for the device."""
        self._counts.publish(now)

    def _grew(self, place: tuple[int, ...], growth: int) -> None:
        mode, layer, event = place
        _metrics()[EVENTS[event]].labels(MODES[mode], str(self.layers[layer])).inc(growth)


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
