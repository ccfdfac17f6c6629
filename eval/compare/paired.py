"""Differences of two runs over the same requests, with bootstrap intervals. Pure.

Requests of one session depend on each other, so sessions are what is drawn: each sample takes as many sessions as there
are, with replacement, and all requests of a drawn session count in both runs. The interval is that of the 2.5th and
97.5th percentiles over the samples (percentile bootstrap, Efron & Tibshirani 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from eval.compare.schema import Difference
from eval.report import definitions as d
from traces.replay.record import RequestRecord

SAMPLES = 2_000
FEWEST_SESSIONS = 5  # with fewer, the samples are hardly any
INTERVAL = (
    f"95 % intervals: {SAMPLES:,} bootstrap samples of whole sessions, paired by request; seed 0. With fewer than"
    f" {FEWEST_SESSIONS} sessions none is given. They tell what other sessions would show, not what"
    " another run would: replay twice to see that."
)

Floats = npt.NDArray[np.float64]
Pair = tuple[RequestRecord, RequestRecord]


class _Ratio(NamedTuple):
    """A statistic that is a sum over a sum."""

    key: str
    title: str
    unit: Literal["fraction", "seconds", "tokens"]
    definition: str
    part: Callable[[RequestRecord], float | None]
    of: Callable[[RequestRecord], float]


def _one(record: RequestRecord) -> float:
    return 1.0


def _cached(record: RequestRecord) -> float:
    return float(d.realized(record, 1))


def _missed(record: RequestRecord) -> float:
    return float(record.prompt_tokens - d.realized(record, 1))


_RATIOS = (
    _Ratio("realized_rate", "realized hit rate", "fraction", "Sum of cached tokens / sum of prompt tokens.",
           _cached, lambda r: float(r.prompt_tokens)),
    _Ratio("computed_tokens", "computed prompt tokens", "tokens", "Mean over requests of prompt - cached tokens.",
           _missed, _one),
    _Ratio("ttft_mean", "TTFT, mean", "seconds", d.definition(d.ttft), d.ttft, _one),
    _Ratio("tpot_mean", "TPOT, mean", "seconds", d.definition(d.tpot), d.tpot, _one),
    _Ratio("e2e_mean", "E2E, mean", "seconds", d.definition(d.e2e), d.e2e, _one),
)  # fmt: skip


def draws(sessions: int, samples: int = SAMPLES, seed: int = 0) -> Floats:
    """How often each session is drawn in each sample, shape (samples, sessions)."""
    return (
        np.random.default_rng(seed).multinomial(sessions, np.full(sessions, 1 / sessions), size=samples).astype(float)
    )


def differences(pairs: Sequence[Pair]) -> list[Difference]:
    """All statistics of the second run less the first; a statistic that some run cannot form is left out."""
    found = []
    for ratio in _RATIOS:
        usable = [pair for pair in pairs if ratio.part(pair[0]) is not None and ratio.part(pair[1]) is not None]
        if usable:
            found.append(_ratio(ratio, usable))
    timed = [pair for pair in pairs if d.ttft(pair[0]) is not None and d.ttft(pair[1]) is not None]
    if timed:
        found.append(_percentile("ttft_p95", "TTFT, 95th percentile", d.ttft, timed, 95.0))
    return found


def _ratio(ratio: _Ratio, pairs: Sequence[Pair]) -> Difference:
    place, count = _sessions(pairs)
    sums = np.zeros((2, 2, count))  # run, part or whole, session
    for at, pair in zip(place, pairs, strict=True):
        for run, record in enumerate(pair):
            sums[run, 0, at] += ratio.part(record) or 0.0
            sums[run, 1, at] += ratio.of(record)
    first, other = (float(sums[run, 0].sum() / sums[run, 1].sum()) for run in (0, 1))
    low, high = None, None
    if count >= FEWEST_SESSIONS:
        weights = draws(count)
        drawn = (weights @ sums[1, 0]) / (weights @ sums[1, 1]) - (weights @ sums[0, 0]) / (weights @ sums[0, 1])
        low, high = _bounds(drawn)
    return Difference(
        key=ratio.key,
        title=ratio.title,
        definition=ratio.definition,
        unit=ratio.unit,
        first=first,
        other=other,
        difference=other - first,
        low=low,
        high=high,
        requests=len(pairs),
        sessions=count,
    )


def _percentile(
    key: str, title: str, seconds: Callable[[RequestRecord], float | None], pairs: Sequence[Pair], q: float
) -> Difference:
    place, count = _sessions(pairs)
    values = [np.array([seconds(pair[run]) for pair in pairs], dtype=np.float64) for run in (0, 1)]
    first, other = (weighted_percentile(v, np.ones((1, len(v))), q)[0] for v in values)
    low, high = None, None
    if count >= FEWEST_SESSIONS:
        weights = draws(count, SAMPLES)
        drawn = np.concatenate(
            [
                weighted_percentile(values[1], part, q) - weighted_percentile(values[0], part, q)
                for part in (weights[i : i + 50][:, place] for i in range(0, SAMPLES, 50))
            ]
        )
        low, high = _bounds(drawn)
    return Difference(
        key=key,
        title=title,
        definition=f"{d.definition(seconds)} The smallest value that {q:g} % of the requests do not exceed.",
        unit="seconds",
        first=float(first),
        other=float(other),
        difference=float(other - first),
        low=low,
        high=high,
        requests=len(pairs),
        sessions=count,
    )


def weighted_percentile(values: Floats, weights: Floats, q: float) -> Floats:
    """The smallest value that ``q`` percent of the weight does not exceed, for each row of weights.

    Args:
        values: shape (n,).
        weights: shape (samples, n), each row with a positive sum.
    """
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[:, order], axis=1)
    at = (reached < q / 100 * reached[:, -1:]).sum(axis=1)
    found: Floats = values[order][np.minimum(at, len(values) - 1)]
    return found


def _sessions(pairs: Sequence[Pair]) -> tuple[npt.NDArray[np.int64], int]:
    """Number of each pair's session, and how many there are."""
    numbers: dict[str, int] = {}
    place = np.array([numbers.setdefault(pair[0].session, len(numbers)) for pair in pairs], dtype=np.int64)
    return place, len(numbers)


def _bounds(drawn: Floats) -> tuple[float, float]:
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)
