"""Figures of single requests: latency against uncached tokens, latency distributions, prompt growth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import plotly.graph_objects as go

from eval.report import definitions as d
from eval.report.figures.base import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    VERMILLION,
    Figure,
    blank,
    left_out,
    name_of,
    spread,
)
from traces.replay.record import RequestRecord

# A page of any run stays small: what is left out is spread evenly, and the definition below says so.
MAX_POINTS = 4000
MAX_FLOWS = 150
MAX_STEPS = 400


def ttft_against_uncached(compared: Sequence[RequestRecord]) -> Figure:
    """One point a request, log-log: what a token that did not hit costs the user."""
    every = [(r, t) for r in compared if (t := d.ttft(r)) is not None and t > 0]
    rows = spread(every, MAX_POINTS)
    plot = blank(
        xaxis={"type": "log", "title": {"text": "uncached prompt tokens"}, "dtick": 1},
        yaxis={"type": "log", "title": {"text": "TTFT"}, "ticksuffix": " s", "dtick": 1},
    )
    for name, mostly, colour, symbol in (
        ("hit >= 50 %", True, BLUE, "circle"),
        ("hit < 50 %", False, VERMILLION, "diamond"),
    ):
        part = [(r, t) for r, t in rows if d.mostly_hit(r) is mostly]
        plot.add_trace(
            go.Scatter(
                x=[r.prompt_tokens - (r.cached_tokens or 0) for r, _ in part],
                y=[t for _, t in part],
                text=[name_of(r) for r, _ in part],
                name=escape(name),
                mode="markers",
                marker={"color": colour, "symbol": symbol, "size": 6, "opacity": 0.55},
                hovertemplate="%{text}<br>%{x:,} uncached tokens<br>%{y:.3g} s<extra></extra>",
            )
        )
    return Figure(
        "ttft",
        "TTFT against uncached tokens",
        f"{d.definition(d.ttft)} Uncached: prompt tokens - cached tokens as the server reported them. One"
        f" point a request; both axes are logarithmic.{left_out(len(rows), len(every), 'requests')}",
        plot,
    )


def latency(completed: Sequence[RequestRecord]) -> Figure:
    """Cumulative distributions; TTFT parted by how much of the prompt hit."""
    plot = blank(
        xaxis={"type": "log", "title": {"text": "seconds"}, "dtick": 1},
        yaxis={"ticksuffix": " %", "range": [0, 101], "title": {"text": "of requests"}},
    )
    mostly = [r for r in completed if d.mostly_hit(r) is True]
    barely = [r for r in completed if d.mostly_hit(r) is False]
    for name, metric, records, colour, dash in (
        ("TTFT, hit >= 50 %", d.TTFT, mostly, BLUE, "solid"),
        ("TTFT, hit < 50 %", d.TTFT, barely, VERMILLION, "dash"),
        ("TTFT, all", d.TTFT, completed if not mostly and not barely else [], BLUE, "solid"),
        ("TPOT", d.TPOT, completed, GREEN, "dot"),
        ("E2E", d.E2E, completed, ORANGE, "dashdot"),
    ):
        values = np.sort([v for r in records if (v := metric.seconds(r)) is not None and v > 0])
        if values.size == 0:
            continue
        share = 100 * np.arange(1, values.size + 1) / values.size
        drawn = np.unique(np.linspace(0, values.size - 1, min(values.size, MAX_STEPS)).round().astype(int))
        plot.add_trace(
            go.Scatter(
                x=values[drawn],
                y=share[drawn],
                name=escape(f"{name} (n={values.size:,})"),
                mode="lines",
                line={"color": colour, "dash": dash, "width": 2, "shape": "hv"},
                hovertemplate="%{y:.1f} % within %{x:.3g} s<extra></extra>",
            )
        )
    text = " ".join(d.definition(m.seconds) for m in (d.TTFT, d.TPOT, d.E2E))
    return Figure("latency", "Latency distributions", f"Share of requests within a time. {text}", plot)


def prompt_growth(completed: Sequence[RequestRecord]) -> Figure:
    """Prompt length by turn, one thin line a flow, and the median over flows."""
    flows: dict[tuple[str, str], list[RequestRecord]] = {}
    by_turn: dict[int, list[int]] = {}
    for r in completed:
        flows.setdefault((r.session, r.flow), []).append(r)
        by_turn.setdefault(r.turn, []).append(r.prompt_tokens)
    drawn = spread(list(flows.values()), MAX_FLOWS)
    x: list[int | None] = []
    y: list[int | None] = []
    text: list[str] = []
    for records in drawn:
        for r in sorted(records, key=lambda r: r.turn):
            x.append(r.turn)
            y.append(r.prompt_tokens)
            text.append(name_of(r))
        x.append(None)
        y.append(None)
        text.append("")
    plot = blank(
        xaxis={"title": {"text": "turn"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "prompt tokens"}, "rangemode": "tozero"},
    )
    plot.add_trace(
        go.Scatter(
            x=x,
            y=y,
            text=text,
            name="one flow",
            mode="lines",
            line={"color": SKY, "width": 1},
            opacity=0.6,
            hovertemplate="%{text}<br>%{y:,} tokens<extra></extra>",
        )
    )
    turns = sorted(by_turn)
    plot.add_trace(
        go.Scatter(
            x=turns,
            y=[float(np.median(by_turn[t])) for t in turns],
            name="median of the flows with this turn",
            mode="lines",
            line={"color": BLUE, "width": 2.5},
            hovertemplate="median %{y:,.0f} tokens<extra></extra>",
        )
    )
    return Figure(
        "growth",
        "Prompt length by turn",
        "Prompt tokens of completed requests, a line for each session's main flow and for each subagent. A"
        f" line that falls is a compacted or edited context.{left_out(len(drawn), len(flows), 'flows')}",
        plot,
    )
