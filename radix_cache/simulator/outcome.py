"""What came of a run: rates, times and what left the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.simulator.layout import REJECTED, Records
from radix_cache.simulator.state import Cache, Loop
from radix_cache.simulator.workload import Workload

if TYPE_CHECKING:
    from radix_cache.simulator.run import Setting


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a run. Rates are over prompt tokens; see ``radix_cache.rates``."""

    setting: Setting
    hit_tokens: int
    host_tokens: int
    prompt_tokens: int
    requests: int
    rejected: int
    seconds: float  # simulated time until the last answer
    mean_context: float  # sum of live contexts in tokens, mean over the time that all clients were busy
    wait_mean: float  # seconds from ready to start, over requests
    wait_p95: float
    start_wait_mean: float  # seconds a free client waited for admission, over sessions
    start_wait_p95: float
    parkings: int
    evicted: dict[str, int]  # tokens by state of their last user
    evictions: int
    rank_rebuilds: int
    fates: Records  # one FATE record a request
    log: Records  # what left the cache, see ``evictions``; empty where it was not asked for

    @property
    def rate(self) -> float:
        """Device hits, 0..1."""
        return self.hit_tokens / self.prompt_tokens

    @property
    def total_rate(self) -> float:
        """Device and host hits, 0..1."""
        return (self.hit_tokens + self.host_tokens) / self.prompt_tokens

    @property
    def throughput(self) -> float:
        """Requests per simulated second."""
        return self.requests / self.seconds if self.seconds else math.inf


class Played(NamedTuple):
    """What an outcome is made of, whichever way a workload was played."""

    fates: Records
    hit_tokens: int
    host_tokens: int
    rejected: int
    seconds: float
    waits: npt.NDArray[np.float64]  # seconds from ready to start, by request
    start_waits: npt.NDArray[np.float64]  # seconds that a free client waited for admission, by session
    evicted: dict[str, int]
    evictions: int
    rebuilds: int
    parkings: int
    mean_context: float
    log: Records


def played_by(cache: Cache, loop: Loop, page: int) -> Played:
    s, p, fates = cache.record, loop.record, cache.fates
    return Played(
        fates=fates,
        hit_tokens=int(fates["hit"].sum(dtype=np.int64)),
        host_tokens=int(fates["host"].sum(dtype=np.int64)),
        rejected=int((fates["status"] == REJECTED).sum()),
        seconds=float(fates["done"].max()),
        waits=fates["start"] - fates["ready"],
        start_waits=loop.sessions["started"] - loop.sessions["wanted"],
        evicted={name: int(s[f"evicted_{name}"]) * page for name in ("live", "parked", "ended", "superseded")},
        evictions=int(s["evictions"]),
        rebuilds=int(s["rebuilds"]),
        parkings=int(p["parkings"]),
        mean_context=float(p["area"] / p["busy"]) if p["busy"] else 0.0,
        log=cache.log[: int(s["logged"])],
    )


def outcome_of(workload: Workload, setting: Setting, played: Played) -> Outcome:
    return Outcome(
        setting=setting,
        hit_tokens=played.hit_tokens,
        host_tokens=played.host_tokens,
        prompt_tokens=workload.prompt_tokens,
        requests=len(played.fates),
        rejected=played.rejected,
        seconds=played.seconds,
        mean_context=played.mean_context,
        wait_mean=float(played.waits.mean()),
        wait_p95=_p95(played.waits),
        start_wait_mean=float(played.start_waits.mean()),
        start_wait_p95=_p95(played.start_waits),
        parkings=played.parkings,
        evicted=played.evicted,
        evictions=played.evictions,
        rank_rebuilds=played.rebuilds,
        fates=played.fates,
        log=played.log,
    )


def _p95(values: npt.NDArray[np.float64]) -> float:
    """``np.percentile(values, 95)``, which takes longer than a short run."""
    at = 0.95 * (len(values) - 1)
    below = int(at)
    above = min(below + 1, len(values) - 1)
    low, high = np.partition(values, (below, above))[[below, above]]
    return float(low + (high - low) * (at - below))
