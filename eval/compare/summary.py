"""Runs side by side, and each of them paired with the first, request by request. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval.compare.doubts import doubts, server_differences
from eval.compare.paired import INTERVAL, Pair, differences
from eval.compare.schema import CompareError, Comparison, Pairing, RunSide
from eval.report import definitions as d
from eval.report.attribution import attribution
from eval.report.latency import throughput
from eval.report.load import Run
from traces.replay.record import RequestRecord

Key = tuple[str, str, int]


def compare(runs: Sequence[Run], names: Sequence[str], *, allow: bool = False) -> Comparison:
    """Compare two runs or more.

    Args:
        runs: the first one is what the others are compared with.
        names: one a run, different.
        allow: compare runs that would be refused; the refusals stay in the result.

    Raises:
        CompareError: fewer than two runs, runs that must not be compared, or no request that all of them completed.
    """
    if len(runs) < 2:
        raise CompareError("give at least two runs to compare")
    found = doubts(runs)
    refused = [doubt for doubt in found if doubt.level == "refuse"]
    if refused and not allow:
        lines = "; ".join(f"{doubt.what} ({' / '.join(doubt.values)}): {doubt.text}" for doubt in refused)
        raise CompareError(f"these runs must not be compared: {lines}. --anyway compares them nevertheless")
    counted = [_counted(run) for run in runs]
    common = set(counted[0]).intersection(*counted[1:])
    if not common:
        raise CompareError("no request was completed in all of these runs with a cached-token count: nothing to pair")
    return Comparison(
        runs=[_side(run, name, own, common) for run, name, own in zip(runs, names, counted, strict=True)],
        doubts=found,
        server_differences=server_differences(runs),
        pairings=[_pairing(name, counted[0], other) for name, other in zip(names[1:], counted[1:], strict=True)],
        interval=INTERVAL,
    )


def _counted(run: Run) -> dict[Key, RequestRecord]:
    """Completed requests with a usable cached-token count."""
    return {(r.session, r.flow, r.turn): r for r in run.records if r.error is None and d.mostly_hit(r) is not None}


def _side(run: Run, name: str, own: dict[Key, RequestRecord], common: set[Key]) -> RunSide:
    paired = [record for key, record in own.items() if key in common]
    why = attribution(run.header, run.records, paired, run.header.server.page_size or 1, run.kv_events)
    completed = [r for r in run.records if r.error is None]
    return RunSide(
        name=name,
        run_id=run.header.run_id,
        recorded=len(run.records),
        failed=len(run.records) - len(completed),
        paired=len(paired),
        prompt_tokens=why.prompt_tokens,
        ideal_rate=why.ideal_tokens / why.prompt_tokens,
        realized_rate=why.realized_tokens / why.prompt_tokens,
        gap_tokens=why.gap_tokens,
        causes={row.cause: row.tokens for row in why.causes},
        evidence=why.evidence.kind,
        ttft_p50_s=_percentile([d.ttft(r) for r in paired], 50),
        ttft_p95_s=_percentile([d.ttft(r) for r in paired], 95),
        e2e_p50_s=_percentile([d.e2e(r) for r in paired], 50),
        tpot_p50_s=_percentile([d.tpot(r) for r in paired], 50),
        output_tokens_per_s=throughput(run.records, completed).output_tokens_per_s,
    )


def _percentile(values: Sequence[float | None], q: float) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.percentile(known, q)) if known else None


def _pairing(name: str, first: dict[Key, RequestRecord], other: dict[Key, RequestRecord]) -> Pairing:
    pairs: list[Pair] = [(record, other[key]) for key, record in first.items() if key in other]
    answered = [(a, b) for a, b in pairs if a.output_sha256 is not None and b.output_sha256 is not None]
    return Pairing(
        name=name,
        requests=len(pairs),
        only_first=len(first) - len(pairs),
        only_other=len(other) - len(pairs),
        same_answers=sum(a.output_sha256 == b.output_sha256 for a, b in answered),
        answers=len(answered),
        same_lengths=all(a.prompt_tokens == b.prompt_tokens for a, b in pairs),
        differences=differences(pairs),
    )
