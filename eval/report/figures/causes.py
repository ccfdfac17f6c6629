"""Figures of the attribution: the waterfall from ideal to realized, causes by session and by depth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from eval.report.figures.base import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, Figure, blank, waterfall_plot
from eval.report.schema_causes import AttributionReport
from eval.report.text import count, shortened, token_range
from radix_cache.attribution.causes import TITLES, Cause

BARS = 25  # sessions drawn
PINK, YELLOW, DARK = "#CC79A7", "#F0E442", "#595959"

# Okabe-Ito's colours; causes that share one differ in the pattern too.
_LOOK: dict[Cause, tuple[str, str]] = {
    Cause.NOT_SHARED: (PINK, ""),
    Cause.PAGE_ALIGNMENT: (GREY, ""),
    Cause.SPECULATION_KEY: (YELLOW, ""),
    Cause.IN_FLIGHT: (SKY, ""),
    Cause.NOT_ADMITTED: (ORANGE, ""),
    Cause.HELD: (ORANGE, "/"),
    Cause.EVICTED: (VERMILLION, ""),
    Cause.OFFLOAD_LOST: (BLUE, ""),
    Cause.OFFLOAD_REFUSED: (BLUE, "x"),
    Cause.RESTORED_LATE: (GREEN, "/"),
    Cause.NOT_RESTORED: (GREEN, ""),
    Cause.NOT_OBSERVED: (VERMILLION, "x"),
    Cause.OVERTAKEN: (SKY, "/"),
    Cause.UNEXPLAINED: (DARK, "/"),
}


def cause_waterfall(found: AttributionReport) -> Figure:
    """From the ideal rate down to the realized one; the axis is cut so that small steps can be seen."""
    prompt = found.prompt_tokens
    top, end = 100 * found.ideal_tokens / prompt, 100 * found.realized_tokens / prompt
    names = [_broken(TITLES[Cause(row.cause)]) for row in found.causes]
    hover = [f"{count(found.ideal_tokens)} tokens"]
    hover += [
        f"{escape(row.title)}<br>{count(-row.tokens)} tokens in {count(row.requests)} requests" for row in found.causes
    ]
    plot, cut = waterfall_plot(
        ["ideal", *names, "realized"],
        top,
        [row.rate_difference for row in found.causes],
        end,
        [*hover, f"{count(found.realized_tokens)} tokens"],
    )
    parts = " ".join(f"{row.title[0].upper()}{row.title[1:]}: {row.definition}" for row in found.causes)
    return Figure(
        "waterfall",
        "From ideal to realized",
        f"Steps in percentage points of the prompt tokens; they sum to the gap exactly. {parts}{cut}",
        plot,
    )


def causes_by_session(found: AttributionReport) -> Figure:
    """Lost tokens of the sessions that lose most, split by cause."""
    rows = found.by_session[:BARS][::-1]
    plot = blank(
        barmode="relative",
        xaxis={"title": {"text": "lost tokens"}, "rangemode": "tozero"},
        yaxis={
            "tickvals": list(range(len(rows))),
            "ticktext": [escape(shortened(row.session, 16)) for row in rows],
            "showgrid": False,
            "automargin": True,
        },
    )
    names = [escape(shortened(row.session, 48)) for row in rows]
    for trace in _bars([row.causes for row in rows], names, horizontal=True):
        plot.add_trace(trace)
    more = len(found.by_session) - len(rows)
    return Figure(
        "causes_by_session",
        "Causes by session",
        "Tokens between ideal and realized, largest gap on top."
        + (f" {more:,} sessions with a smaller gap are not drawn." if more else ""),
        plot,
        max(260, 120 + 22 * len(rows)),
    )


def causes_by_depth(found: AttributionReport) -> Figure:
    """Lost tokens by where in the prompt they stand."""
    names = [token_range(row.from_token, row.to_token) for row in found.by_depth]
    plot = blank(
        barmode="relative",
        xaxis={"title": {"text": "position in the prompt, tokens"}, "tickangle": 0, "showgrid": False},
        yaxis={"title": {"text": "lost tokens"}},
    )
    for trace in _bars([row.causes for row in found.by_depth], names, horizontal=False):
        plot.add_trace(trace)
    return Figure(
        "causes_by_depth",
        "Causes by depth",
        "Tokens between ideal and realized by their position in the prompt: a loss near the start costs a long prompt"
        " all that follows.",
        plot,
    )


def _bars(parts: Sequence[dict[str, int]], names: Sequence[str], *, horizontal: bool) -> list[Any]:
    traces = []
    for cause in Cause:
        values = [part.get(cause.value, 0) for part in parts]
        if not any(values):
            continue
        colour, pattern = _LOOK[cause]
        title = escape(TITLES[cause])
        hover = [f"{name}<br>{title}: {count(value)} tokens" for name, value in zip(names, values, strict=True)]
        places: list[Any] = list(range(len(parts))) if horizontal else list(names)
        traces.append(
            go.Bar(
                x=values if horizontal else places,
                y=places if horizontal else values,
                orientation="h" if horizontal else "v",
                name=title,
                marker={"color": colour, "pattern": {"shape": pattern, "size": 5}},
                hovertext=hover,
                hoverinfo="text",
            )
        )
    return traces


def _broken(title: str) -> str:
    """A label that fits under a bar: a word a line, without what is in brackets."""
    return "<br>".join(escape(word) for word in title.split(" (")[0].split())
