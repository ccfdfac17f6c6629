"""Counts that CUDA graphs add to, published from the host without waiting for the device.

A CUDA graph replays kernels without running Python, so a Python counter would count captures. An addition to a tensor
on the device is captured with the layers that it counts and replayed with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

MODES = ("decode", "extend", "verify")  # extend: prefill, chunked prefill, prefill behind a cached prefix

PUBLISH_EVERY_S = 1.0


def mode_of(forward_mode: Any) -> str:
    """The mode of a forward pass, from SGLang's ``ForwardMode``."""
    return "decode" if forward_mode.is_decode() else "verify" if forward_mode.is_target_verify() else "extend"


class DeviceCounts:
    """Int64 counts on the device.

    Args:
        shape: of the counts.
        device: where what is counted runs.
        grew: told of each count that grew, by its indices and by how much; None: nothing is published.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        device: torch.device | str,
        grew: Callable[[tuple[int, ...], int], None] | None,
    ) -> None:
        self.values = torch.zeros(shape, dtype=torch.int64, device=device)
        self._grew = grew
        self._copy = _HostCopy(self.values)
        self._published = torch.zeros(shape, dtype=torch.int64)
        self._next_publication = 0.0

    def publish(self, now: float | None = None) -> None:
        """Publish what was counted, at most once a second and without waiting for the device."""
        if self._grew is None:
            return
        now = time.monotonic() if now is None else now
        if now < self._next_publication:
            return
        latest = self._copy.take()
        if latest is None:
            return
        self._next_publication = now + PUBLISH_EVERY_S
        growth = latest - self._published
        for place in growth.nonzero().tolist():
            self._grew(tuple(place), int(growth[tuple(place)]))
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
