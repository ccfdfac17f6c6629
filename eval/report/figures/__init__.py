"""The figures of the page: each one a plotly figure and the definition printed under it."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report import definitions as d
from eval.report.cache_use import cache_use, evictions, held_by_requests
from eval.report.figures.base import Figure
from eval.report.figures.causes import cause_waterfall, causes_by_depth, causes_by_session
from eval.report.figures.rates import sessions, waterfall
from eval.report.figures.requests import latency, prompt_growth, ttft_against_uncached
from eval.report.figures.timeline import over_time, session_timeline
from eval.report.figures.what_if import capacity_curve
from eval.report.schema import Report
from traces.replay.events import KvEvents
from traces.replay.metrics import Sample
from traces.replay.record import RequestRecord

__all__ = ["Figure", "figures"]


def figures(
    report: Report,
    records: Sequence[RequestRecord],
    events: KvEvents | None = None,
    samples: Sequence[Sample] = (),
) -> list[Figure]:
    """Every figure that the run has data for.

    Args:
        report: the summary of ``records``.
        records: the run's records.
        events: the run's cache events, if any were recorded.
        samples: the server's counters during the run, if any were taken.
    """
    completed = [r for r in records if r.error is None]
    compared = [r for r in completed if d.mostly_hit(r) is not None]
    page = report.page_size.tokens
    why = report.attribution
    uses = [None if events is None else cache_use(events), held_by_requests(samples)]
    top = waterfall(report) if why is None else cause_waterfall(why)
    drawn = [top, over_time(report, records, compared or completed, page, [use for use in uses if use is not None])]
    if why is not None and why.gap_tokens:
        drawn += [causes_by_session(why), causes_by_depth(why)]
    if report.what_if is not None and report.what_if.curve:
        drawn.append(capacity_curve(report.what_if))
    if compared and any(r.first_token_s is not None for r in compared):
        drawn.append(ttft_against_uncached(compared))
    gone = [] if events is None else evictions(events, records)
    drawn += [session_timeline(report, records, gone), sessions(report), latency(completed), prompt_growth(completed)]
    return drawn
