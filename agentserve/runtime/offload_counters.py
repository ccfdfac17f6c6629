"""What offloading did, at ``/metrics``. Names begin with ``agentserve_offload_``."""

from __future__ import annotations

from collections.abc import Iterable


class OffloadCounters:
    """Prometheus counters of one rank; all calls are no-ops where ``enabled`` is false.

    Create it in the scheduler only: SGLang names the folder that its processes share their numbers in before it
    imports ``prometheus_client``, and so must we.

    Args:
        rank: tensor-parallel rank, a label of every number.
        enabled: whether SGLang was started with metrics.
        deadlines: seconds after which a lookup, a load or a store is given up. They and a second more are bounds of
            the histogram, so that a scrape says exactly how many took longer.
    """

    def __init__(self, rank: int, *, enabled: bool, deadlines: Iterable[float] = ()) -> None:
        self._rank = str(rank)
        self._enabled = enabled
        if not enabled:
            return
        from prometheus_client import Counter, Gauge, Histogram

        self._tokens = Counter(
            "agentserve_offload_tokens",
            "Tokens by what became of them: stored, restored, verified, refused (a seal did not fit), abandoned "
            "(a load or store was given up), quarantined (their slots were set aside) or released (and given back).",
            ["event", "rank"],
        )
        self._restored = Counter(
            "agentserve_offload_restored_tokens",
            "Restored tokens by where the daemon had them: host (its memory), storage (the Redis behind it) or unknown "
            "(a daemon that is not agentserve's does not tell).",
            ["tier", "rank"],
        )
        self._not_stored = Counter(
            "agentserve_offload_tokens_not_stored",
            "Tokens that were not stored, by reason: ended (nobody asks for them again), superseded (their flow went "
            "another way) or evicted (before it was decided). Only with a policy.",
            ["reason", "rank"],
        )
        self._lookups = Counter(
            "agentserve_offload_lookups",
            "Lookups by outcome: hit, miss, late (given up) or offline (not asked).",
            ["outcome", "rank"],
        )
        self._seconds = Counter("agentserve_offload_seconds", "Seconds the scheduler waited.", ["wait", "rank"])
        bounds = {0.01, 0.05, 0.25, 1.0}.union(*({deadline, deadline + 0.25, deadline + 1} for deadline in deadlines))
        self._waits = Histogram(
            "agentserve_offload_wait_seconds",
            "How long a request waited for a lookup (other requests go on) or a load (none does), and how long stored "
            "tokens could not be evicted (store).",
            ["wait", "rank"],
            buckets=sorted(bounds),
        )
        self._online = Gauge(
            "agentserve_offload_online", "Whether the daemon is in use.", ["rank"], multiprocess_mode="livemin"
        )
        self._losses = Counter("agentserve_offload_daemon_losses", "Times that the daemon was lost.", ["rank"])

    def tokens(self, event: str, count: int) -> None:
        if self._enabled and count:
            self._tokens.labels(event, self._rank).inc(count)

    def restored(self, tier: str, count: int) -> None:
        if self._enabled and count:
            self._restored.labels(tier, self._rank).inc(count)

    def not_stored(self, reason: str, count: int) -> None:
        if self._enabled and count:
            self._not_stored.labels(reason, self._rank).inc(count)

    def lookup(self, outcome: str) -> None:
        if self._enabled:
            self._lookups.labels(outcome, self._rank).inc()

    def waited(self, wait: str, seconds: float) -> None:
        if self._enabled:
            self._seconds.labels(wait, self._rank).inc(seconds)

    def took(self, wait: str, seconds: float) -> None:
        """A lookup, a load or a store is over."""
        if self._enabled:
            self._waits.labels(wait, self._rank).observe(seconds)

    def online(self, now: bool) -> None:
        if self._enabled:
            self._online.labels(self._rank).set(int(now))

    def lost(self) -> None:
        if self._enabled:
            self._losses.labels(self._rank).inc()
