"""What the policies did, at ``/metrics``. Names begin with ``agentserve_``."""

from __future__ import annotations

from typing import Any


class PolicyCounters:
    """Prometheus counters of one scheduler process; all calls are no-ops where ``enabled`` is false.

    Create it in the scheduler only: SGLang names the folder that its processes share their numbers in before it
    imports ``prometheus_client``, and so must we.
    """

    def __init__(self, policy: str, *, enabled: bool) -> None:
        self._policy = policy
        self._enabled = enabled
        if not enabled:
            return
        from prometheus_client import Counter, Gauge

        self._evicted = Counter(
            "agentserve_evicted_tokens",
            "Tokens evicted from the device cache, by the policy and by what was known of the victim.",
            ["policy", "victim"],
        )
        self._victims = Counter("agentserve_victims", "Victims chosen; the last one of a walk may be cut.")
        self._cut = Counter("agentserve_victims_cut", "Victims of which only the tail was evicted.")
        self._choice = Counter("agentserve_victim_choice_seconds", "Seconds spent choosing victims.")
        self._learned = Counter("agentserve_index_rebuilds", "Times that learned ranks were computed anew.")
        self._waiting = Gauge(
            "agentserve_sessions_waiting",
            "Sessions that admission keeps from starting.",
            multiprocess_mode="livesum",
        )
        self._parked = Gauge(
            "agentserve_sessions_parked",
            "Started sessions whose next request admission holds.",
            multiprocess_mode="livesum",
        )
        self._flows = Gauge(
            "agentserve_flows_known",
            "Conversations in the session table.",
            multiprocess_mode="livesum",
        )

    def evicted(self, victim: str, tokens: int, cut: bool) -> None:
        if self._enabled:
            self._evicted.labels(self._policy, victim).inc(tokens)
            self._victims.inc()
            if cut:
                self._cut.inc()

    def chose(self, seconds: float) -> None:
        if self._enabled:
            self._choice.inc(seconds)

    def learned(self, times: int) -> None:
        if self._enabled and times:
            self._learned.inc(times)

    def queue(self, waiting: int, parked: int, flows: int) -> None:
        if self._enabled:
            _set(self._waiting, waiting)
            _set(self._parked, parked)
            _set(self._flows, flows)


def _set(gauge: Any, value: int) -> None:
    gauge.set(value)
