"""Figures of hit rates: down the chain, over time, by session."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from eval.report import definitions as d
from eval.report.figures.base import BLUE, GREEN, ORANGE, SKY, Figure, blank, waterfall_plot
from eval.report.schema import Report
from eval.report.text import count, percent, shortened
from traces.replay.record import RequestRecord

BARS = 25  # sessions drawn
MAX_BINS = 60


def waterfall(report: Report) -> Figure:
    """From the ideal rate down to the realized one; the axis is cut so that small steps can be seen."""
    chain = report.chain
    prompt = chain.prompt_tokens
    names = {
        "page_alignment": "page<br>align-<br>ment",
        "not_ready": "not<br>ready",
        "not_attributed": "evicted /<br>not ad-<br>mitted",
    }
    top, end = 100 * chain.ideal_tokens / prompt, 100 * chain.end_tokens / prompt
    hover = [f"{count(chain.ideal_tokens)} tokens"]
    hover += [
        f"{escape(s.title)}<br>{count(-s.tokens)} tokens<br>lost {count(s.lost_tokens)} in"
        f" {count(s.lost_requests)} requests<br>gained {count(s.gained_tokens)} in {count(s.gained_requests)}"
        for s in chain.steps
    ]
    hover.append(f"{count(chain.end_tokens)} tokens")
    plot, cut = waterfall_plot(
        ["ideal", *(names[s.key] for s in chain.steps), chain.end_key],
        top,
        [s.rate_difference for s in chain.steps],
        end,
        hover,
    )
    parts = " ".join(f"{s.title[0].upper()}{s.title[1:]}: {s.definition}" for s in chain.steps)
    return Figure(
        "waterfall",
        f"From ideal to {chain.end_key}",
        f"{report.rate_definition} Steps in percentage points; they sum to the gap exactly. {parts}{cut}",
        plot,
    )


def running(records: Sequence[RequestRecord], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean number of requests sent and not yet ended, in each interval between edges (seconds, increasing).

    The integral of a request's presence up to time t is clip(t - sent, 0, done - sent); its difference
    over an interval is the time it was there.
    """
    sent = np.array([r.sent_s for r in records])
    length = np.array([r.done_s for r in records]) - sent
    present = np.array([np.clip(edge - sent, 0, length).sum() for edge in edges])
    return np.diff(present) / np.diff(edges)


def over_time(
    report: Report, records: Sequence[RequestRecord], population: Sequence[RequestRecord], page: int
) -> Figure:
    """Hit rate of the requests sent in each interval, above the number of running requests."""
    start, end = min(r.sent_s for r in records), max(r.done_s for r in records)
    bins = int(np.clip(len(population) // 10, 1, MAX_BINS))
    edges = np.linspace(start, end if end > start else start + 1, bins + 1)
    centre = (edges[:-1] + edges[1:]) / 2
    sent = np.array([r.sent_s for r in population])
    prompt, _ = np.histogram(sent, edges, weights=[r.prompt_tokens for r in population])
    plot = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.68, 0.32], vertical_spacing=0.07)
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
    plot.add_trace(
        go.Scatter(
            x=centre,
            y=running(records, edges),
            name="running",
            mode="lines",
            line={"color": SKY, "width": 1.5, "shape": "hvh"},
            fill="tozeroy",
            showlegend=False,
            hovertemplate="%{y:.1f} running",
        ),
        row=2,
        col=1,
    )
    plot.update_yaxes(title_text="hit rate", ticksuffix=" %", row=1, col=1)
    plot.update_yaxes(title_text="running", rangemode="tozero", row=2, col=1)
    plot.update_xaxes(title_text="seconds since the start", row=2, col=1)
    return Figure(
        "over_time",
        "Hit rate and running requests over time",
        f"Above: {d.definition(d.rate)[:-1]} that were sent in an interval of {edges[1] - edges[0]:.3g} s; an"
        " interval without one has no point. Below: mean number of requests sent and not yet ended, failed"
        " ones included.",
        plot,
        460,
    )


def sessions(report: Report) -> Figure:
    """Realized rate as a bar, theoretical as a tick, the sessions that lose most tokens on top."""
    rows = report.sessions[:BARS][::-1]
    position = list(range(len(rows)))
    plot = blank(
        xaxis={"ticksuffix": " %", "title": {"text": "hit rate"}, "rangemode": "tozero", "range": [0, 102]},
        yaxis={
            "tickvals": position,
            "ticktext": [escape(shortened(r.session, 16)) for r in rows],
            "showgrid": False,
            "automargin": True,
        },
        barmode="overlay",
    )
    hover = [
        f"{escape(shortened(r.session, 48))}<br>{count(r.requests)} requests, {count(r.prompt_tokens)} prompt"
        f" tokens<br>theoretical {percent(r.theoretical_rate)}, realized {percent(r.realized_rate)}<br>gap"
        f" {count(r.gap_tokens)}"
        for r in rows
    ]
    if report.rate("realized") is not None:
        plot.add_trace(
            go.Bar(
                x=[100 * (r.realized_rate or 0) for r in rows],
                y=position,
                orientation="h",
                name="realized",
                marker={"color": BLUE},
                hovertext=hover,
                hoverinfo="text",
            )
        )
    plot.add_trace(
        go.Scatter(
            x=[100 * r.theoretical_rate for r in rows],
            y=position,
            mode="markers",
            name="theoretical",
            marker={"symbol": "line-ns", "size": 12, "line": {"color": ORANGE, "width": 3}, "color": ORANGE},
            hovertext=hover,
            hoverinfo="text",
        )
    )
    more = len(report.sessions) - len(rows)
    return Figure(
        "sessions",
        "Sessions",
        "Rates of one session's compared requests; theoretical is page-aligned, sharing across sessions"
        " included. Largest gap in tokens on top."
        + (f" {more:,} sessions with a smaller gap are not drawn." if more else ""),
        plot,
        max(260, 120 + 22 * len(rows)),
    )
