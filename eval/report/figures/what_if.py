"""The capacity curve: simulated hit rate by cache size, with this run's own point on it."""

from __future__ import annotations

from html import escape

import numpy as np
import plotly.graph_objects as go

from eval.report.figures.base import BLUE, DARK, GREEN, GREY, ORANGE, PINK, VERMILLION, Figure, blank
from eval.report.schema_what_if import WhatIf
from eval.report.text import count
from eval.report.text_what_if import gigabytes

# By policy: colour, dash, marker; one that is not listed here is the run's own.
_LOOKS = {
    "lru": (VERMILLION, "solid", "circle"),
    "gittins": (BLUE, "dash", "square"),
    "belady": (GREEN, "dot", "diamond"),
}
_TICKS = 5  # as many as a phone has room for
_OTHER = (PINK, "longdash", "triangle-up")


def capacity_curve(found: WhatIf) -> Figure:
    """One line a policy; the theoretical rate is what a cache without bounds hits."""
    sizes = [point.capacity_tokens for point in found.curve]
    named = [_size(size, found) for size in sizes]
    ticks = [float(f"{tick:.2g}") for tick in np.geomspace(sizes[0], sizes[-1], _TICKS)] if len(sizes) > 1 else sizes
    plot = blank(
        xaxis={
            "type": "log",
            "title": {"text": "cache, tokens"},
            "tickvals": ticks,
            "ticktext": [short(tick) for tick in ticks],
            "tickangle": 0,
        },
        yaxis={"title": {"text": "hit rate"}, "ticksuffix": " %"},
    )
    theory = 100 * found.theoretical_rate
    plot.add_trace(
        go.Scatter(
            x=[sizes[0], sizes[-1]],
            y=[theory, theory],
            name="theoretical",
            mode="lines",
            line={"color": GREY, "dash": "dashdot", "width": 1.5},
            hovertemplate="theoretical %{y:.2f} %<extra></extra>",
        )
    )
    for policy in dict.fromkeys(name for point in found.curve for name in point.rates):
        colour, dash, symbol = _LOOKS.get(policy, _OTHER)
        drawn = [(p, name) for p, name in zip(found.curve, named, strict=True) if p.rates.get(policy) is not None]
        plot.add_trace(
            go.Scatter(
                x=[p.capacity_tokens for p, _ in drawn],
                y=[100 * (p.rates[policy] or 0.0) for p, _ in drawn],
                text=[f"{escape(policy)}, {name}" for _, name in drawn],
                name=escape(policy),
                mode="lines+markers",
                line={"color": colour, "dash": dash, "width": 2},
                marker={"symbol": symbol, "size": 7},
                hovertemplate="%{text}<br>%{y:.2f} %<extra></extra>",
            )
        )
    rate = found.realized_rate if found.realized_rate is not None else found.simulated_rate
    if found.capacity_tokens is not None and rate is not None:
        kind = "realized" if found.realized_rate is not None else "simulated"
        plot.add_trace(
            go.Scatter(
                x=[found.capacity_tokens],
                y=[100 * rate],
                text=[f"this run, {kind}, {_size(found.capacity_tokens, found)}"],
                name=f"this run, {kind}",
                mode="markers",
                marker={"symbol": "star", "size": 15, "color": ORANGE, "line": {"color": DARK, "width": 1}},
                hovertemplate="%{text}<br>%{y:.2f} %<extra></extra>",
            )
        )
    return Figure(
        "capacity",
        "Hit rate by cache size",
        "Simulated on this run's own requests, each policy alone; the axis of sizes is logarithmic. Theoretical: a"
        " cache without bounds. A request that does not fit into a cache at all hits nothing there. belady knows the"
        " future, so no server reaches it. The star is what the server reported at the size that it had."
        f" Live contexts are {count(round(found.live_tokens))} tokens on average.",
        plot,
    )


def short(tokens: float) -> str:
    """Two digits and a unit: 630k, 1.2M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= unit:
            return f"{tokens / unit:.3g}{name}"
    return f"{tokens:g}"


def _size(tokens: int, found: WhatIf) -> str:
    size = f"{tokens:,} tokens"
    return size if found.bytes_per_token is None else f"{size} ({gigabytes(tokens * found.bytes_per_token)})"
