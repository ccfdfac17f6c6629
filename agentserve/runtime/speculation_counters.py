"""What speculation did, at ``/metrics``. Names begin with ``agentserve_speculation``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from agentserve.runtime.speculation import SpeculationSettings


class SpeculationCounters:
    """Prometheus counters of one scheduler process; all calls are no-ops where ``enabled`` is false.

    Create it in the scheduler only, as ``PolicyCounters`` says. Acceptance length is ``1 + accepted / steps``, the
    acceptance of position i is ``accepted{position="i"} / steps``.
    """

    def __init__(self, settings: SpeculationSettings, drafts: int, *, enabled: bool) -> None:
        self._mode = settings.mode
        self._enabled = enabled
        if not enabled:
            return
        from prometheus_client import Counter as Total
        from prometheus_client import Gauge

        self._steps = Total(
            "agentserve_speculation_steps",
            "Verification steps of single requests, by whether acceptance is real or synthetic.",
            ["mode"],
        )
        self._accepted = Total(
            "agentserve_speculation_accepted_drafts",
            "Drafts accepted, by their position after the last certain token, from 1.",
            ["mode", "position"],
        )
        # There from the start, so that a client can label its run before the first step.
        Gauge(
            "agentserve_speculation",
            "Drafts a verification step.",
            ["mode", "length", "keys"],
            multiprocess_mode="livemax",
        ).labels(self._mode, "" if settings.length is None else f"{settings.length:g}", settings.keys).set(drafts)

    def verified(self, accepted: Iterable[int]) -> None:
        """One step of a batch; ``accepted`` holds each request's number of accepted drafts."""
        if not self._enabled:
            return
        by_drafts = Counter(accepted)
        if not by_drafts:
            return
        at_least = sum(by_drafts.values())
        self._steps.labels(self._mode).inc(at_least)
        for position in range(1, max(by_drafts) + 1):
            at_least -= by_drafts[position - 1]
            self._accepted.labels(self._mode, str(position)).inc(at_least)
