"""The figures of the page: each one a plotly figure and the definition printed under it."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report import definitions as d
from eval.report.figures.base import Figure
from eval.report.figures.causes import cause_waterfall, causes_by_depth, causes_by_session
from eval.report.figures.rates import over_time, sessions, waterfall
from eval.report.figures.requests import latency, prompt_growth, ttft_against_uncached
from eval.report.schema import Report
from traces.replay.record import RequestRecord

__all__ = ["Figure", "figures"]


def figures(report: Report, records: Sequence[RequestRecord]) -> list[Figure]:
    """Every figure that the run has data for.

    Args:
        report: the summary of ``records``.
        records: the run's records.
    """
    completed = [r for r in records if r.error is None]
    compared = [r for r in completed if d.mostly_hit(r) is not None]
    page = report.page_size.tokens
    why = report.attribution
    top = waterfall(report) if why is None else cause_waterfall(why)
    drawn = [top, over_time(report, records, compared or completed, page)]
    if why is not None and why.gap_tokens:
        drawn += [causes_by_session(why), causes_by_depth(why)]
    if compared and any(r.first_token_s is not None for r in compared):
        drawn.append(ttft_against_uncached(compared))
    drawn += [sessions(report), latency(completed), prompt_growth(completed)]
    return drawn
