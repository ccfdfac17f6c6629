"""Latencies, throughput and goodput of the recorded requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from eval.report.definitions import CLIENT_LAG, LATENCIES, Metric, definition, mostly_hit, tpot, ttft
from eval.report.schema import Goodput, GoodputGroup, Latency, Throughput
from traces.replay.record import RequestRecord


class Slo(NamedTuple):
    """Service-level objectives in seconds; None means no objective."""

    ttft_s: float | None = None
    tpot_s: float | None = None


def latencies(completed: Sequence[RequestRecord]) -> list[Latency]:
    """One row a metric and group; a group without a value has no row. Percentiles interpolate linearly."""
    mostly = [r for r in completed if mostly_hit(r) is True]
    barely = [r for r in completed if mostly_hit(r) is False]
    rows: list[Latency] = []
    for metric in LATENCIES:
        rows += _latency(metric, "all", completed)
        if metric is not CLIENT_LAG:  # what hits has no part in it
            rows += _latency(metric, "hit >= 50 %", mostly)
            rows += _latency(metric, "hit < 50 %", barely)
    return rows


def _latency(
    metric: Metric, group: Literal["all", "hit >= 50 %", "hit < 50 %"], records: Sequence[RequestRecord]
) -> list[Latency]:
    values = np.array([v for r in records if (v := metric.seconds(r)) is not None], dtype=np.float64)
    if values.size == 0:
        return []
    p50, p90, p95, p99 = (float(v) for v in np.percentile(values, (50, 90, 95, 99)))
    return [
        Latency(
            metric=metric.key,
            title=metric.title,
            group=group,
            requests=int(values.size),
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            mean=float(values.mean()),
            max=float(values.max()),
        )
    ]


def throughput(records: Sequence[RequestRecord], completed: Sequence[RequestRecord]) -> Throughput:
    """Completed requests and their tokens over wall time: from the first request sent to the last one ended.
    Think time is part of it, a pause before a resume is not."""
    wall = max(r.done_s for r in records) - min(r.sent_s for r in records)

    def per_second(amount: int) -> float | None:
        return amount / wall if wall > 0 else None

    return Throughput(
        definition=definition(throughput),
        wall_s=wall,
        requests_per_s=per_second(len(completed)),
        output_tokens_per_s=per_second(sum(r.output_tokens for r in completed)),
        prompt_tokens_per_s=per_second(sum(r.prompt_tokens for r in completed)),
    )


def goodput(
    records: Sequence[RequestRecord], completed: Sequence[RequestRecord], wall_s: float, slo: Slo
) -> Goodput | None:
    """Completed requests that meet every objective given; the fraction is of all recorded requests, failed
    ones included. A request without a first token misses a TTFT objective; one with fewer than 2 output
    tokens has no TPOT and meets any."""
    if slo.ttft_s is None and slo.tpot_s is None:
        return None
    good = sum(1 for r in completed if _meets(r, slo))
    return Goodput(
        definition=definition(goodput),
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        requests=good,
        fraction=good / len(records),
        requests_per_s=good / wall_s if wall_s > 0 else None,
        groups=[*_group("hit >= 50 %", True, completed, slo), *_group("hit < 50 %", False, completed, slo)],
    )


def _group(
    name: Literal["hit >= 50 %", "hit < 50 %"], mostly: bool, completed: Sequence[RequestRecord], slo: Slo
) -> list[GoodputGroup]:
    own = [r for r in completed if mostly_hit(r) is mostly]
    good = sum(1 for r in own if _meets(r, slo))
    return [GoodputGroup(group=name, requests=len(own), within=good, fraction=good / len(own))] if own else []


def _meets(record: RequestRecord, slo: Slo) -> bool:
    first, per_token = ttft(record), tpot(record)
    if slo.ttft_s is not None and (first is None or first > slo.ttft_s):
        return False
    return slo.tpot_s is None or per_token is None or per_token <= slo.tpot_s
