"""A grid of simulator settings: policies x capacities x admissions x orders of sessions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import NamedTuple

from radix_cache.simulator import Outcome, Setting, Workload, simulate
from radix_cache.simulator.run import unbounded

BELADY = "belady"


@dataclass(frozen=True)
class Axes:
    """What to vary. Capacities are tokens (``200000``) or multiples of the live contexts (``1.0x``)."""

    policies: tuple[str, ...]
    capacities: tuple[str, ...]
    admissions: tuple[str, ...] = ("none",)
    orders: int = 1  # random orders of the sessions, seeds 0, 1, ...

    @property
    def runs(self) -> int:
        """Runs of the simulator, without those of the unbounded cache."""
        return self.orders * len(self.capacities) * len(self.policies) * len(self.admissions)


@dataclass(frozen=True)
class Row:
    """One run, as it goes into tables. Lengths in tokens, times in seconds, rates 0..1 of prompt tokens."""

    policy: str
    admission: str
    capacity: str
    capacity_tokens: int
    capacity_ratio: float  # over the live contexts of this order
    order: int
    rate: float
    host_rate: float  # further tokens served by the host tier
    theoretical: float  # the same sessions and order with an unbounded cache
    requests: int
    rejected: int
    requests_per_s: float
    wait_mean: float
    wait_p95: float
    start_wait_mean: float
    start_wait_p95: float
    parkings: int
    evicted_live: int
    evicted_parked: int
    evicted_ended: int
    evicted_superseded: int


class Result(NamedTuple):
    rows: list[Row]
    live_contexts: float  # W: sum of live contexts with an unbounded cache in tokens, mean over time and orders
    theoretical: float  # mean over orders


def parse_capacity(text: str, live_contexts: float) -> int:
    """Tokens of a capacity given as tokens or as a multiple of the live contexts (``1.25x``).

    Raises:
        ValueError: neither of these, or not above 0.
    """
    number = text[:-1] if text.endswith("x") else text
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"capacity {text!r} is neither tokens (200000) nor a multiple of the live contexts (1.25x)")
    return int(value * live_contexts) if text.endswith("x") else int(value)


def run_grid(
    workload: Workload,
    axes: Axes,
    base: Setting,
    *,
    host_capacity: str = "",
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Run every combination.

    Args:
        workload: what to play.
        axes: what to vary.
        base: everything else.
        host_capacity: size of the host tier, written like a capacity; none when empty.
        progress: called before each run with its name, and once more with "" at the end.
    """
    say = progress or (lambda _: None)
    references: list[Outcome] = []
    for order in range(axes.orders):
        say(f"unbounded cache, order {order}")
        references.append(simulate(workload, unbounded(replace(base, order_seed=order))))
    live = fmean(reference.mean_context for reference in references)
    if host_capacity:
        base = replace(base, host_capacity=parse_capacity(host_capacity, live))
    capacities = [(text, parse_capacity(text, live)) for text in axes.capacities]
    rows = []
    for order, reference in enumerate(references):
        for text, tokens in capacities:
            for admission in axes.admissions:
                for policy in axes.policies:
                    say(f"{policy}, {admission}, {text}, order {order}")
                    setting = replace(base, policy=policy, admission=admission, capacity=tokens, order_seed=order)
                    outcome = simulate(workload, setting, reference=reference)
                    rows.append(_row(outcome, reference, text, order))
    say("")
    return Result(rows, live, fmean(reference.rate for reference in references))


def _row(outcome: Outcome, reference: Outcome, capacity: str, order: int) -> Row:
    setting = outcome.setting
    return Row(
        policy=setting.policy,
        admission=setting.admission,
        capacity=capacity,
        capacity_tokens=setting.capacity,
        capacity_ratio=setting.capacity / reference.mean_context if reference.mean_context else math.inf,
        order=order,
        rate=outcome.rate,
        host_rate=outcome.host_tokens / outcome.prompt_tokens,
        theoretical=reference.rate,
        requests=outcome.requests,
        rejected=outcome.rejected,
        requests_per_s=outcome.throughput,
        wait_mean=outcome.wait_mean,
        wait_p95=outcome.wait_p95,
        start_wait_mean=outcome.start_wait_mean,
        start_wait_p95=outcome.start_wait_p95,
        parkings=outcome.parkings,
        evicted_live=outcome.evicted["live"],
        evicted_parked=outcome.evicted["parked"],
        evicted_ended=outcome.evicted["ended"],
        evicted_superseded=outcome.evicted["superseded"],
    )


def mean_over_orders(rows: Sequence[Row]) -> list[dict[str, float | str]]:
    """One entry a (policy, admission, capacity), in order of appearance: means, and the range of the rate."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.policy, row.admission, row.capacity), []).append(row)
    means: list[dict[str, float | str]] = []
    for group in groups.values():
        entry: dict[str, float | str] = {}
        for name, value in asdict(group[0]).items():
            if name != "order":
                entry[name] = value if isinstance(value, str) else fmean(getattr(row, name) for row in group)
        entry["rate_min"] = min(row.rate for row in group)
        entry["rate_max"] = max(row.rate for row in group)
        means.append(entry)
    return means


def closed_share(rows: Sequence[Row], policy: str, capacity: str, *, admission: str = "none") -> float | None:
    """Part of what Belady shows to be closable over LRU that a policy closes; None without all three."""
    rates = {
        name: [r.rate for r in rows if (r.policy, r.capacity, r.admission) == (name, capacity, admission)]
        for name in ("lru", policy, BELADY)
    }
    if not all(rates.values()):
        return None
    lru, own, best = (fmean(rates[name]) for name in ("lru", policy, BELADY))
    return (own - lru) / (best - lru) if best > lru else None
