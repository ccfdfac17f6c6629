"""From records to the report's numbers. Pure: no files, no clock, no rendering.

Which requests a rate is about is decided once, in ``_Population``: completed requests whose cached-token
count the server reported (*compared*). Theory is summed over exactly these, or else the gap would compare two
different sets of prompts. Only where no count was reported at all is it summed over every completed request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from eval.report import definitions as d
from eval.report.acceptance import drafting
from eval.report.attribution import attribution
from eval.report.completeness import completeness
from eval.report.latency import Slo, goodput, latencies, throughput
from eval.report.provenance import data_set, doubts, run_info
from eval.report.schema import (
    AuditLine,
    Chain,
    ChainStep,
    ErrorRow,
    MeanRate,
    PageSize,
    Population,
    Rate,
    Report,
    ReportError,
    SessionRow,
    Tiers,
    WorstRequest,
)
from radix_cache.rates import HitRate
from traces.replay.events import KvEvents
from traces.replay.record import RequestRecord, RunEvent, RunHeader
from traces.replay.store import TurnKey

WORST = 10  # requests listed


class _Population(NamedTuple):
    compared: list[RequestRecord]  # completed, with a usable cached count
    completed: list[RequestRecord]
    without_count: int
    faulty_count: int

    @property
    def records(self) -> list[RequestRecord]:
        return self.compared or self.completed


def summarize(
    header: RunHeader,
    records: Sequence[RequestRecord],
    events: Sequence[RunEvent],
    *,
    page_size: int | None = None,
    slo: Slo | None = None,
    notes: Sequence[str] = (),
    kv_events: KvEvents | None = None,
    audit: Sequence[AuditLine] = (),
    texts: Mapping[TurnKey, str] | None = None,
) -> Report:
    """Forms every number of the report.

    Args:
        header: the run's settings.
        records: in order of completion.
        events: in order of time.
        page_size: tokens per page for the theoretical rates; None takes the server's.
        slo: objectives for goodput; None reports no goodput.
        notes: oddities of reading the run, carried into the report.
        kv_events: what the server's cache stored and dropped meanwhile, where that was recorded.
        texts: prompts as text, where they are known: then the report says why clients' prompts changed.
        audit: the fast paths of the server during the run, where its counters were recorded.

    Raises:
        ReportError: no record, no completed record, or a record with impossible numbers.
    """
    if not records:
        raise ReportError("the run has no recorded request: nothing to report; replay or resume it")
    seen: set[tuple[str, str, int]] = set()
    for record in records:
        _check(record, seen)
    page = _page_size(header, page_size)
    completed = [r for r in records if r.error is None]
    if not completed:
        kinds = ", ".join(f"{row.requests} x {row.kind}" for row in _errors(records))
        raise ReportError(
            f"all {len(records)} recorded requests failed ({kinds}): no rate can be formed. First error: "
            f"{_errors(records)[0].example}"
        )
    population = _population(completed)
    speed = throughput(records, completed)
    measured = latencies(completed)
    queues = any(row.metric == d.QUEUE.key for row in measured)  # not every server tells
    return Report(
        run=run_info(header),
        data_set=data_set(header),
        completeness=completeness(header, records, events),
        page_size=page,
        population=_describe(population, records),
        rate_definition=d.definition(d.rate),
        rates=_rates(population, page.tokens),
        mean_rates=_mean_rates(population, page.tokens),
        chain=_chain(population, page.tokens),
        attribution=(
            attribution(header, records, population.compared, page.tokens, kv_events, texts)
            if population.compared
            else None
        ),
        tiers=_tiers(population.compared),
        latency=measured,
        latency_definitions={
            **{m.key: d.definition(m.seconds) for m in d.LATENCIES if m is not d.QUEUE or queues},
            "groups": d.definition(d.mostly_hit),
        },
        throughput=speed,
        goodput=goodput(records, completed, speed.wall_s, slo or Slo()),
        drafting=drafting(header, completed),
        audit=list(audit),
        sessions=_sessions(population, records, page.tokens),
        worst=_worst(population.compared, page.tokens),
        errors=_errors(records),
        notes=[*notes, *doubts(header, completed, page)],
    )


def _check(record: RequestRecord, seen: set[tuple[str, str, int]]) -> None:
    where = f"requests.jsonl, session {record.session}, flow {record.flow}, turn {record.turn}"
    key = (record.session, record.flow, record.turn)
    if key in seen:
        raise ReportError(f"{where}: recorded twice; remove one of the two lines")
    seen.add(key)
    for field in ("ready_s", "sent_s", "done_s"):
        if not math.isfinite(getattr(record, field)):
            raise ReportError(f"{where}, field '{field}': not a finite number; remove this record")
    if record.first_token_s is not None and not math.isfinite(record.first_token_s):
        raise ReportError(f"{where}, field 'first_token_s': not a finite number; remove this record")
    if record.prompt_tokens < 1:
        raise ReportError(f"{where}, field 'prompt_tokens': must be >= 1; remove this record")
    for field in ("session_lcp", "session_output_lcp", "shared_lcp", "shared_output_lcp", "ready_lcp"):
        if getattr(record, field) < 0:
            raise ReportError(f"{where}, field '{field}': negative; remove this record")


def _page_size(header: RunHeader, option: int | None) -> PageSize:
    if option is not None:
        if option < 1:
            raise ReportError(f"page size {option}: must be >= 1")
        return PageSize(tokens=option, source="option")
    if header.server.page_size is not None:
        return PageSize(tokens=header.server.page_size, source="server")
    return PageSize(tokens=1, source="assumed")


def _population(completed: list[RequestRecord]) -> _Population:
    counted = [r for r in completed if r.cached_tokens is not None]
    compared = [r for r in counted if d.mostly_hit(r) is not None]
    return _Population(compared, completed, len(completed) - len(counted), len(counted) - len(compared))


def _describe(population: _Population, recorded: Sequence[RequestRecord]) -> Population:
    basis: Literal["compared", "completed"] = "compared" if population.compared else "completed"
    failed = len(recorded) - len(population.completed)
    used = population.records
    what = (
        "completed requests with a cached-token count from the server"
        if population.compared
        else "completed requests; the server reported no usable cached count, so no rate is realized"
    )
    text = (
        f"{len(used):,} of {len(recorded):,} recorded requests: {what}. Left out: {failed:,} failed, "
        f"{population.without_count if population.compared else 0:,} without a count, "
        f"{population.faulty_count if population.compared else 0:,} with an impossible count."
    )
    return Population(
        requests=len(used),
        prompt_tokens=sum(r.prompt_tokens for r in used),
        basis=basis,
        text=text,
        failed=failed,
        without_count=population.without_count,
        faulty_count=population.faulty_count,
    )


def _rate(level: d.Level, records: Sequence[RequestRecord], page: int) -> Rate:
    total = HitRate()
    for r in records:
        total.add(level.tokens(r, page), r.prompt_tokens)
    return Rate(
        key=level.key,
        title=level.title,
        definition=d.definition(level.tokens),
        hit_tokens=total.hit_tokens,
        prompt_tokens=total.prompt_tokens,
        requests=total.requests,
        rate=d.rate(total.hit_tokens, total.prompt_tokens),
    )


def _rates(population: _Population, page: int) -> list[Rate]:
    rates = [_rate(level, population.records, page) for level in d.THEORY]
    if population.compared:
        rates.insert(3, _rate(d.REALIZED, population.compared, page))  # after the levels it is the end of
    return rates


def _mean_rates(population: _Population, page: int) -> list[MeanRate]:
    levels = [d.ALIGNED, d.REALIZED] if population.compared else [d.ALIGNED]
    return [
        MeanRate(
            key=f"mean_request_{level.key}",
            title=f"mean of per-request rates, {level.title}",
            definition=d.definition(d.mean_request_rate),
            requests=len(population.records),
            mean=d.mean_request_rate([level.tokens(r, page) / r.prompt_tokens for r in population.records]),
        )
        for level in levels
    ]


def _chain(population: _Population, page: int) -> Chain:
    records = population.records
    prompt = sum(r.prompt_tokens for r in records)
    steps: list[ChainStep] = []
    chain = d.CHAIN if population.compared else d.CHAIN[:-1]
    for step in chain:
        differences = [step.upper.tokens(r, page) - step.lower.tokens(r, page) for r in records]
        lost = [x for x in differences if x > 0]
        gained = [-x for x in differences if x < 0]
        steps.append(
            ChainStep(
                key=step.key,
                title=step.title,
                definition=step.definition,
                tokens=sum(lost) - sum(gained),
                lost_tokens=sum(lost),
                gained_tokens=sum(gained),
                lost_requests=len(lost),
                gained_requests=len(gained),
                rate_difference=(sum(lost) - sum(gained)) / prompt,
            )
        )
    top = sum(d.IDEAL.tokens(r, page) for r in records)
    end = sum(chain[-1].lower.tokens(r, page) for r in records)
    return Chain(
        steps=steps,
        ideal_tokens=top,
        end_tokens=end,
        end_key="realized" if population.compared else "ready",
        gap_tokens=top - end,
        prompt_tokens=prompt,
    )


def _tiers(compared: list[RequestRecord]) -> Tiers | None:
    reported = [r for r in compared if (r.cached_device, r.cached_host, r.cached_storage) != (None, None, None)]
    if not reported:
        return None
    device = sum(r.cached_device or 0 for r in reported)
    host = sum(r.cached_host or 0 for r in reported)
    storage = sum(r.cached_storage or 0 for r in reported)
    total = sum(r.cached_tokens or 0 for r in compared)
    return Tiers(
        requests=len(reported),
        device=device,
        host=host,
        storage=storage,
        unsplit=total - device - host - storage,
    )


def _sessions(population: _Population, recorded: Sequence[RequestRecord], page: int) -> list[SessionRow]:
    failed = Counter(r.session for r in recorded if r.error is not None)
    by_session: dict[str, list[RequestRecord]] = {}
    for r in population.records:
        by_session.setdefault(r.session, []).append(r)
    rows = []
    for session, records in by_session.items():
        prompt = sum(r.prompt_tokens for r in records)
        theory = sum(d.aligned(r, page) for r in records)
        real = sum(d.realized(r, page) for r in records) if population.compared else None
        rows.append(
            SessionRow(
                session=session,
                requests=len(records),
                failed=failed[session],
                prompt_tokens=prompt,
                theoretical_tokens=theory,
                theoretical_rate=d.rate(theory, prompt),
                realized_tokens=real,
                realized_rate=None if real is None else d.rate(real, prompt),
                gap_tokens=None if real is None else theory - real,
            )
        )
    return sorted(rows, key=lambda row: (-(row.gap_tokens or 0), row.session))


def _worst(compared: list[RequestRecord], page: int) -> list[WorstRequest]:
    def gap(r: RequestRecord) -> int:
        return d.aligned(r, page) - d.realized(r, page)

    ranked = sorted(compared, key=lambda r: (-gap(r), r.session, r.flow, r.turn))
    return [
        WorstRequest(
            session=r.session,
            flow=r.flow,
            turn=r.turn,
            sent_s=r.sent_s,
            prompt_tokens=r.prompt_tokens,
            theoretical_tokens=d.aligned(r, page),
            ready_tokens=d.ready(r, page),
            realized_tokens=d.realized(r, page),
            gap_tokens=gap(r),
            ttft_s=d.ttft(r),
        )
        for r in ranked[:WORST]
        if gap(r) > 0
    ]


def _errors(recorded: Sequence[RequestRecord]) -> list[ErrorRow]:
    errors = [r.error for r in recorded if r.error is not None]
    first: dict[str, str] = {}
    for error in errors:
        first.setdefault(error.kind, error.message)
    counts = Counter(error.kind for error in errors)
    return [ErrorRow(kind=kind, requests=n, example=first[kind]) for kind, n in counts.most_common()]
