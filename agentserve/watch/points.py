"""One look at ``/metrics``, reduced to what the page shows, and a ring of such looks. No SGLang, no HTTP."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from agentserve.audit.counters import CACHED_TOKENS, OFFLOAD_ONLINE, OFFLOAD_TOKENS, Metrics
from agentserve.watch.fates import Fates

PROMPT_TOKENS = "agentserve_prompt_tokens_total"
PROMPTS = "agentserve_prompts_total"
EVICTED = "agentserve_evicted_tokens_total"
SERVER_EVICTED = "sglang:evicted_tokens_total"
LOOKUPS = "agentserve_offload_lookups_total"
WAITING, PARKED = "agentserve_sessions_waiting", "agentserve_sessions_parked"
RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"
USAGE, KV_TOKENS = "sglang:token_usage", "sglang:max_total_num_tokens"
GENERATED = "sglang:generation_tokens_total"

SERIES = 180  # points kept; one every 5 s is a quarter of an hour
TIERS = ("device", "host", "storage")
VICTIMS = (*("superseded", "ended", "parked", "shared", "waits_tool", "waits_turn", "waits_unknown", "unknown"),)
OFFLOAD_EVENTS = ("stored", "restored", "verified", "refused", "abandoned", "quarantined", "released")
LOOKUP_OUTCOMES = ("hit", "miss", "late", "offline")


class Counted(NamedTuple):
    """What only grows, since the server's start; or what it grew by between two points. Tokens, but for ``prompts``."""

    fates: Fates
    prompts: float
    tiers: tuple[float, ...]  # cached tokens of ended requests, in the order of TIERS
    evicted: float
    victims: tuple[float, ...]  # in the order of VICTIMS; all zero without a policy of ours
    offload: tuple[float, ...]  # in the order of OFFLOAD_EVENTS
    lookups: tuple[float, ...]  # in the order of LOOKUP_OUTCOMES
    generated: float

    def since(self, earlier: Counted) -> Counted:
        """The growth; counters that fell belong to another server and are kept whole."""
        return Counted(
            Fates(*(int(n) for n in _all_grown(self.fates, earlier.fates))),
            _grown(self.prompts, earlier.prompts),
            _all_grown(self.tiers, earlier.tiers),
            _grown(self.evicted, earlier.evicted),
            _all_grown(self.victims, earlier.victims),
            _all_grown(self.offload, earlier.offload),
            _all_grown(self.lookups, earlier.lookups),
            _grown(self.generated, earlier.generated),
        )


def _all_grown(now: Iterable[float], then: Iterable[float]) -> tuple[float, ...]:
    return tuple(_grown(a, b) for a, b in zip(now, then, strict=True))


def _grown(now: float, then: float) -> float:
    return now - then if now >= then else now


@dataclass(frozen=True)
class Point:
    """The server at one moment.

    Attributes:
        at: the observer's clock, in seconds.
        usage: share of the KV cache that running requests hold, 0 to 1; prefixes that could be evicted are not in it.
        offload_online: None without an offload tier.
    """

    at: float
    counted: Counted
    running: float
    queued: float
    usage: float
    kv_tokens: float
    sessions_waiting: float
    sessions_parked: float
    offload_online: bool | None


def point_of(metrics: Metrics, at: float) -> Point:
    """What one scrape says. Counters of several schedulers (data parallel) are summed."""
    online = metrics.total(OFFLOAD_ONLINE)
    ours = metrics.count(EVICTED)
    counted = Counted(
        Fates(*(int(metrics.count(PROMPT_TOKENS, fate=fate)) for fate in Fates._fields)),
        metrics.count(PROMPTS),
        tuple(metrics.count(CACHED_TOKENS, cache_source=tier) for tier in TIERS),
        ours or metrics.count(SERVER_EVICTED),
        tuple(metrics.count(EVICTED, victim=victim) for victim in VICTIMS),
        tuple(metrics.count(OFFLOAD_TOKENS, event=event) for event in OFFLOAD_EVENTS),
        tuple(metrics.count(LOOKUPS, outcome=outcome) for outcome in LOOKUP_OUTCOMES),
        metrics.count(GENERATED),
    )
    return Point(
        at=at,
        counted=counted,
        running=metrics.count(RUNNING),
        queued=metrics.count(QUEUED),
        usage=metrics.count(USAGE),
        kv_tokens=metrics.count(KV_TOKENS),
        sessions_waiting=metrics.count(WAITING),
        sessions_parked=metrics.count(PARKED),
        offload_online=None if online is None else online > 0,
    )


class Ring:
    """The latest points, oldest first.

    Args:
        limit: points kept.
        apart: seconds that two kept points are apart at least; a nearer one takes the place of the last.
    """

    def __init__(self, limit: int = SERIES, apart: float = 4.0) -> None:
        self._points: deque[Point] = deque(maxlen=limit)
        self._apart = apart

    def add(self, point: Point) -> None:
        if len(self._points) >= 2 and point.at - self._points[-2].at < self._apart:
            self._points[-1] = point
        else:
            self._points.append(point)

    def points(self) -> list[Point]:
        return list(self._points)

    def before(self, at: float) -> Point | None:
        """The latest point at or before a time, else the oldest."""
        points = self.points()
        return next((p for p in reversed(points) if p.at <= at), points[0] if points else None)
