"""Figures over the run's clock: hit rate with load and cache use, and what each session did when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eval.report import definitions as d
from eval.report.cache_use import Evicted, Use
from eval.report.figures.base import (
    BLUE,
    DARK,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILLION,
    Figure,
    blank,
    left_out,
    name_of,
    spread,
)
from eval.report.schema import Report
from eval.report.text import count, percent, seconds, shortened
from traces.replay.record import RequestRecord

MAX_BINS = 60
ROWS = 24  # sessions of the timeline
MAX_BARS = 1500
USE_POINTS = 600  # of the cache's use
SLICES = 240  # of the run, within which a session's evictions are one mark


class _Look(NamedTuple):
    name: str
    colour: str
    pattern: str
    holds: Callable[[RequestRecord], bool]


def _hit_share(record: RequestRecord) -> float | None:
    if record.error is not None or record.cached_tokens is None:
        return None
    return record.cached_tokens / record.prompt_tokens


def _between(low: float, high: float) -> Callable[[RequestRecord], bool]:
    def holds(record: RequestRecord) -> bool:
        part = _hit_share(record)
        return part is not None and low <= part < high

    return holds


_LOOKS = (
    _Look("hit >= 90 %", BLUE, "", _between(0.9, np.inf)),
    _Look("hit 50 to 90 %", SKY, "", _between(0.5, 0.9)),
    _Look("hit < 50 %", VERMILLION, "/", _between(-np.inf, 0.5)),
    _Look("failed, or no count", GREY, "x", lambda r: _hit_share(r) is None),
)


def running(records: Sequence[RequestRecord], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean number of requests sent and not yet ended, in each interval between edges (seconds, increasing)."""
    sent = np.array([r.sent_s for r in records])
    return present(sent, np.array([r.done_s for r in records]), edges)


def running_sessions(records: Sequence[RequestRecord], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean number of sessions between their first request and their last answer, in each interval."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for r in records:
        first[r.session] = min(first.get(r.session, r.sent_s), r.sent_s)
        last[r.session] = max(last.get(r.session, r.done_s), r.done_s)
    return present(np.array(list(first.values())), np.array([last[s] for s in first]), edges)


def present(
    start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Mean number of spans that hold, in each interval between edges.

    The integral of a span's presence up to time t is clip(t - start, 0, end - start); its difference over an
    interval is the time it was there.
    """
    length = end - start
    area = np.array([np.clip(edge - start, 0, length).sum() for edge in edges])
    return np.diff(area) / np.diff(edges)


def over_time(
    report: Report,
    records: Sequence[RequestRecord],
    population: Sequence[RequestRecord],
    page: int,
    uses: Sequence[Use] = (),
) -> Figure:
    """Hit rate of the requests sent in each interval, above running sessions and requests, and cached tokens."""
    start, end = min(r.sent_s for r in records), max(r.done_s for r in records)
    bins = int(np.clip(len(population) // 10, 1, MAX_BINS))
    edges = np.linspace(start, end if end > start else start + 1, bins + 1)
    centre = (edges[:-1] + edges[1:]) / 2
    sent = np.array([r.sent_s for r in population])
    prompt, _ = np.histogram(sent, edges, weights=[r.prompt_tokens for r in population])
    uses = [use for use in uses if len(use.at_s)]
    heights = [0.5, 0.25, 0.25] if uses else [0.64, 0.36]
    plot = make_subplots(rows=len(heights), cols=1, shared_xaxes=True, row_heights=heights, vertical_spacing=0.06)
    plot.update_layout(template="none", hovermode="x unified")
    lines = [(d.ALIGNED, ORANGE, "dash"), (d.READY, GREEN, "dot")]
    if report.rate("realized") is not None:
        lines.append((d.REALIZED, BLUE, "solid"))
    for level, colour, dash in lines:
        hit, _ = np.histogram(sent, edges, weights=[level.tokens(r, page) for r in population])
        values = [None if p == 0 else 100 * h / p for h, p in zip(hit, prompt, strict=True)]
        plot.add_trace(
            go.Scatter(
                x=centre,
                y=values,
                name="theoretical" if level is d.ALIGNED else level.title,
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"size": 4},
                connectgaps=True,
                hovertemplate="%{y:.2f} %",
            ),
            row=1,
            col=1,
        )
    for name, number, colour, fill, dash in (
        ("running sessions", running_sessions(records, edges), DARK, None, "dot"),
        ("running requests", running(records, edges), SKY, "tozeroy", "solid"),
    ):
        plot.add_trace(
            go.Scatter(
                x=centre,
                y=number,
                name=name,
                mode="lines",
                line={"color": colour, "width": 1.5, "shape": "hvh", "dash": dash},
                fill=fill,
                hovertemplate=f"%{{y:.1f}} {name}",
            ),
            row=2,
            col=1,
        )
    used = _draw_uses(plot, uses, report, start) if uses else ""
    plot.update_yaxes(title_text="hit rate", ticksuffix=" %", row=1, col=1)
    plot.update_yaxes(title_text="running", rangemode="tozero", row=2, col=1)
    plot.update_xaxes(title_text="seconds since the start", row=len(heights), col=1)
    return Figure(
        "over_time",
        "Hit rate, load and cache over time",
        f"Top: {report.rate_definition} Each point is the requests sent in one of {bins} equal intervals. Below:"
        " sessions between their first request and their last answer, and requests sent and not yet ended, mean over an"
        f" interval.{used}",
        plot,
        560 if uses else 460,
    )


def _draw_uses(plot: go.Figure, uses: Sequence[Use], report: Report, start: float) -> str:
    """Tokens on the device; returns what the definition says of them."""
    told = []
    for use, (colour, dash) in zip(uses, ((GREEN, "solid"), (PINK, "dot")), strict=False):
        at = np.array(spread(list(range(len(use.at_s))), USE_POINTS))
        plot.add_trace(
            go.Scatter(
                x=np.maximum(use.at_s[at], start),
                y=use.tokens[at],
                name=use.title,
                mode="lines",
                line={"color": colour, "width": 1.5, "shape": "hv", "dash": dash},
                hovertemplate=f"%{{y:,}} tokens {use.title}",
            ),
            row=3,
            col=1,
        )
        told.append(f"{use.title}: {use.definition}.{left_out(len(at), len(use.at_s), 'moments')}")
    capacity = report.run.kv_capacity_tokens
    if capacity is not None:
        plot.add_hline(y=capacity, line={"color": GREY, "dash": "dash", "width": 1.5}, row=3, col=1)
        told.append(f"The dashed line is the capacity of {count(capacity)} tokens.")
    plot.update_yaxes(title_text="KV tokens", rangemode="tozero", tickformat="~s", row=3, col=1)
    return " Bottom, " + " ".join(told)


def session_timeline(report: Report, records: Sequence[RequestRecord], evicted: Sequence[Evicted]) -> Figure:
    """One row a session: bars are requests, the space between them is waiting, crosses are evictions."""
    names = [row.session for row in report.sessions[:ROWS]]
    place = {name: len(names) - 1 - i for i, name in enumerate(names)}
    own = sorted((r for r in records if r.session in place), key=lambda r: r.sent_s)
    drawn = spread(own, MAX_BARS)
    plot = blank(
        barmode="overlay",
        xaxis={"title": {"text": "seconds since the start"}},
        yaxis={
            "tickvals": [place[name] for name in names],
            "ticktext": [escape(shortened(name, 16)) for name in names],
            "range": [-0.7, len(names) - 0.3],
            "showgrid": False,
            "automargin": True,
        },
    )
    for look in _LOOKS:
        part = [r for r in drawn if look.holds(r)]
        if not part:
            continue
        plot.add_trace(
            go.Bar(
                x=[r.done_s - r.sent_s for r in part],
                base=[r.sent_s for r in part],
                y=[place[r.session] for r in part],
                width=0.62,
                orientation="h",
                name=escape(look.name),
                # The line keeps a request of a few milliseconds visible in a run of hours.
                marker={
                    "color": look.colour,
                    "line": {"color": look.colour, "width": 1},
                    "pattern": {"shape": look.pattern, "size": 5},
                },
                hovertext=[_told(r) for r in part],
                hoverinfo="text",
            )
        )
    marks = _marks(evicted, place, records)
    if marks:
        plot.add_trace(
            go.Scatter(
                x=[m.at_s for m in marks],
                y=[place[m.session] - 0.42 for m in marks],
                name="evictions",
                mode="markers",
                marker={"symbol": "x-thin", "size": 6, "line": {"color": DARK, "width": 1.5}},
                hovertext=[f"{escape(shortened(m.session, 40))}<br>{count(m.tokens)} tokens evicted" for m in marks],
                hoverinfo="text",
            )
        )
    more = len(report.sessions) - len(names)
    return Figure(
        "timeline",
        "Sessions over time",
        "A row a session, largest gap on top; a bar is a request from sending to its last token, what is between bars"
        " is the wait before the next turn. Crosses below a row: tokens of this session left the device's cache."
        + ("" if evicted else " None are drawn without cache events, or where nothing was evicted.")
        + (f" {more:,} sessions with a smaller gap are not drawn." if more else "")
        + left_out(len(drawn), len(own), "requests"),
        plot,
        max(260, 130 + 24 * len(names)),
    )


def _told(record: RequestRecord) -> str:
    hit = _hit_share(record)
    outcome = f"hit {percent(hit)}" if record.error is None else f"failed: {escape(record.error.kind)}"
    return (
        f"{name_of(record)}<br>{count(record.prompt_tokens)} prompt tokens, {outcome}<br>waited"
        f" {seconds(record.think_s)}, took {seconds(record.done_s - record.sent_s)}"
    )


def _marks(evicted: Sequence[Evicted], place: dict[str, int], records: Sequence[RequestRecord]) -> list[Evicted]:
    """One mark for a session's evictions within a slice of the run."""
    if not evicted:
        return []
    start, end = min(r.sent_s for r in records), max(r.done_s for r in records)
    width = max(end - start, 1e-9) / SLICES
    sums: dict[tuple[str, int], tuple[float, int]] = {}
    for one in evicted:
        if one.session in place:
            key = (one.session, int((one.at_s - start) / width))
            at, tokens = sums.get(key, (one.at_s, 0))
            sums[key] = (at, tokens + one.tokens)
    return [Evicted(at, session, tokens) for (session, _), (at, tokens) in sums.items()]
