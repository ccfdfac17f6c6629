"""Figures of hit rates: down the chain, over time, by session."""

from __future__ import annotations

from html import escape

import plotly.graph_objects as go

from eval.report.figures.base import BLUE, ORANGE, Figure, blank, waterfall_plot
from eval.report.schema import Report
from eval.report.text import count, percent, shortened

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
