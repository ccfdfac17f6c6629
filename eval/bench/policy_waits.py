"""Waiting times of a simulated run, waits at admission included. Pure: reads an outcome, runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from radix_cache.simulator import Outcome, Workload
from radix_cache.simulator.run import session_order

PERCENTILES = (50, 90, 99)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Waits:
    """Seconds from the wish to the first token: mean and percentiles of one set of requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Floats) -> Waits:
        return cls(float(seconds.mean()), *(float(p) for p in np.percentile(seconds, PERCENTILES)))


@dataclass(frozen=True)
class RunWaits:
    """Attributes:

    turns: over all requests. A session's first request waits from when a client was free for the session, any
        other from when its think time was over: being parked, queued and prefilled all count.
    starts: over the first request of each session alone.
    sessions_waiting: sessions that a client wanted to start and admission held, mean over the run.
    requests_waiting: requests of started sessions that were parked or queued, mean over the run.
    """

    turns: Waits
    starts: Waits
    sessions_waiting: float
    requests_waiting: float


def session_wishes(workload: Workload, outcome: Outcome) -> Floats:
    """When a client was free for each session, in seconds, by number of the session.

    The first ``setting.sessions`` are wanted at 0; each later one when the next session ends, in order of arrival.
    """
    fates, setting = outcome.fates, outcome.setting
    order = session_order(workload, setting.order_seed)
    first = workload.flows["first"][workload.sessions["first_flow"]]
    ends = np.sort(np.maximum.reduceat(fates["done"], first))
    wishes = np.zeros(len(order))
    later = order[setting.sessions :]
    wishes[later] = ends[: len(later)]
    return wishes


def run_waits(workload: Workload, outcome: Outcome) -> RunWaits:
    """Waits of a run; think times do not count."""
    fates = outcome.fates
    first = workload.flows["first"][workload.sessions["first_flow"]]
    # A main conversation may begin later than its session, whose subagents were first.
    wishes = session_wishes(workload, outcome) + np.minimum(
        workload.requests["think"][first], outcome.setting.think_cap
    )
    since = fates["ready"].copy()
    since[first] = wishes
    waited = fates["first_token"] - since
    return RunWaits(
        turns=Waits.of(waited),
        starts=Waits.of(waited[first]),
        sessions_waiting=float((fates["ready"][first] - wishes).sum() / outcome.seconds),
        requests_waiting=float((fates["start"] - fates["ready"]).sum() / outcome.seconds),
    )
