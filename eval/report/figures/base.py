"""What every figure of the page shares.

Colours are Okabe-Ito's, distinct for the colour-blind; lines also differ in dash, markers in shape.
Text from records is escaped, since plotly reads a subset of HTML in its labels. Fonts, grid and background
are left to the page, which knows whether it is light, dark or printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple, TypeVar

import numpy as np
import plotly.graph_objects as go

from eval.report.text import points, shortened
from traces.replay.record import RequestRecord

ORANGE, SKY, GREEN, BLUE, VERMILLION, GREY = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#8C8C8C"
PINK, DARK = "#CC79A7", "#595959"

_T = TypeVar("_T")


class Figure(NamedTuple):
    key: str  # id in the page
    title: str
    definition: str
    plot: Any  # plotly.graph_objects.Figure
    height: int = 380


def blank(**layout: Any) -> Any:
    """A plotly figure without plotly's own theme."""
    return go.Figure(layout={"template": "none", **layout})


def spread(items: list[_T], most: int) -> list[_T]:
    """At most ``most`` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def left_out(drawn: int, total: int, what: str) -> str:
    """What a definition says when not everything is drawn."""
    return f" Drawn: {drawn:,} of {total:,} {what}, evenly spread." if drawn < total else ""


def name_of(record: RequestRecord) -> str:
    """A request in a hover text, escaped."""
    return escape(f"{shortened(record.session, 20)} / {shortened(record.flow, 12)} / {record.turn}")


def waterfall_plot(
    names: Sequence[str], top: float, drops: Sequence[float], end: float, hover: Sequence[str]
) -> tuple[Any, str]:
    """A waterfall of hit rates; the axis is cut so that small steps can be seen.

    Args:
        names: of the first level, each step and the last level.
        top, end: rates in percent.
        drops: what each step takes off, as a fraction of the prompt tokens; negative where it adds.
        hover: a text for each name.

    Returns:
        The plot, and a sentence on where the axis starts; empty where it starts at 0.
    """
    levels = [top]
    for drop in drops:
        levels.append(levels[-1] - 100 * drop)
    span = max(max(levels) - min(levels), 0.1)
    low = max(0.0, min(levels) - 0.35 * span)
    plot = blank(
        yaxis={
            "range": [low, min(100.0, max(levels)) + 0.15 * span],
            "ticksuffix": " %",
            "title": {"text": "hit rate"},
        },
        xaxis={"tickangle": 0, "showgrid": False},
        showlegend=False,
    )
    plot.add_trace(
        go.Waterfall(
            x=list(names),
            y=[top, *(-100 * drop for drop in drops), end],
            measure=["absolute", *("relative" for _ in drops), "total"],
            text=[f"{top:.2f} %", *(points(-drop) for drop in drops), f"{end:.2f} %"],
            textposition="outside",
            hovertext=list(hover),
            hoverinfo="text",
            cliponaxis=False,
            connector={"line": {"color": GREY, "width": 1, "dash": "dot"}},
            totals={"marker": {"color": BLUE}},
            decreasing={"marker": {"color": VERMILLION}},
            increasing={"marker": {"color": GREEN}},
        )
    )
    return plot, f" The axis starts at {low:.4g} %." if low > 0 else ""
