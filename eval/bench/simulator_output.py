"""Results of a simulator grid as a terminal table, CSV, Parquet and one HTML page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import plotly.graph_objects as go
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from rich.console import Group
from rich.table import Table

from eval.bench.simulator_grid import BELADY, Result, mean_over_orders

TITLE = "Prefix-cache hit rate by capacity"
NEAR = 0.01  # of the theoretical rate: little is left to win by more memory

Mean = dict[str, float | str]  # of ``mean_over_orders``


def shown(result: Result) -> Group:
    """What a terminal shows: hit rates, speeds and waits by capacity, and what follows from them."""
    rates = _by_capacity(
        result,
        f"Hit rate in %, theoretical {100 * result.theoretical:.2f}; "
        f"1.0x is {result.live_contexts:,.0f} tokens, the mean of the live contexts",
        "sum(hit tokens) / sum(prompt tokens), device cache; host tier after a plus sign",
        _rate,
    )
    speeds = _by_capacity(
        result,
        "Requests per s; mean wait of a request and of a session's start in s",
        "by the service model, not by a server",
        lambda m: f"{m['requests_per_s']:.3f}; {m['wait_mean']:.1f}, {m['start_wait_mean']:.0f}",
    )
    return Group(rates, speeds, *findings(result))


def _by_capacity(result: Result, title: str, caption: str, cell: Callable[[Mean], str]) -> Table:
    """One line a policy and admission, one column a capacity; means over the orders."""
    means = mean_over_orders(result.rows)
    capacities = list(dict.fromkeys(str(m["capacity"]) for m in means))
    made = Table(title=title, caption=caption)
    made.add_column("policy")
    made.add_column("admission")
    for capacity in capacities:
        made.add_column(capacity, justify="right")
    for policy, admission in dict.fromkeys((str(m["policy"]), str(m["admission"])) for m in means):
        line = {str(m["capacity"]): m for m in means if (m["policy"], m["admission"]) == (policy, admission)}
        made.add_row(policy, admission, *(cell(line[c]) for c in capacities))
    return made


def findings(result: Result) -> list[str]:
    """Which policy to take at each capacity, and how much memory each needs: one sentence an entry."""
    means = mean_over_orders(result.rows)
    said = []
    for capacity in dict.fromkeys(str(m["capacity"]) for m in means):
        here = [m for m in means if m["capacity"] == capacity]
        online = [m for m in here if m["policy"] != BELADY]
        if not online:
            continue
        best = max(online, key=lambda m: float(m["rate"]))
        text = f"{capacity}: {_name(best)} hits most, {100 * float(best['rate']):.2f} %"
        for policy in ("lru", BELADY):
            other = [m for m in here if (m["policy"], m["admission"]) == (policy, "none")]
            if other and other[0] is not best:
                more = 100 * (float(best["rate"]) - float(other[0]["rate"]))
                text += f", {abs(more):.2f} points {'below' if more < 0 else 'above'} {policy}"
        said.append(text + ".")
    enough = []
    for policy, admission in dict.fromkeys((str(m["policy"]), str(m["admission"])) for m in means):
        near = [
            m
            for m in means
            if (m["policy"], m["admission"]) == (policy, admission) and result.theoretical - float(m["rate"]) <= NEAR
        ]
        if near and policy != BELADY:
            least = min(near, key=lambda m: float(m["capacity_tokens"]))
            enough.append(f"{_name(least)} {float(least['capacity_tokens']):,.0f} tokens ({least['capacity']})")
    if enough:
        said.append(f"Of these capacities, enough to be within a point of the theoretical rate: {'; '.join(enough)}.")
    else:
        said.append("None of these capacities brings a policy within a point of the theoretical rate.")
    return said


def _name(mean: Mean) -> str:
    return str(mean["policy"]) if mean["admission"] == "none" else f"{mean['policy']} with {mean['admission']}"


def _rate(mean: Mean) -> str:
    text = f"{100 * float(mean['rate']):.2f}"
    host = 100 * float(mean["host_rate"])
    return f"{text} +{host:.2f}" if host else text


def write(result: Result, out: Path) -> list[Path]:
    """Write ``results.csv``, ``results.parquet`` (one row a run) and ``hit-rate.html``; return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    rows = pa.Table.from_pylist([asdict(row) for row in result.rows])
    paths = [out / "results.csv", out / "results.parquet", out / "hit-rate.html"]
    pyarrow.csv.write_csv(rows, paths[0])
    pyarrow.parquet.write_table(rows, paths[1])
    # The library goes into the page: it must open without a network.
    figure(result).write_html(paths[2], include_plotlyjs=True, full_html=True)
    return paths


def figure(result: Result) -> go.Figure:
    """Hit rate over capacity: one line a policy and admission, the theoretical rate across."""
    means = mean_over_orders(result.rows)
    chart = go.Figure()
    several = len({m["admission"] for m in means}) > 1
    for policy, admission in dict.fromkeys((str(m["policy"]), str(m["admission"])) for m in means):
        line = [m for m in means if (m["policy"], m["admission"]) == (policy, admission)]
        line.sort(key=lambda m: float(m["capacity_tokens"]))
        rates = [100 * float(m["rate"]) for m in line]
        chart.add_scatter(
            x=[float(m["capacity_tokens"]) / result.live_contexts for m in line],
            y=rates,
            name=f"{policy}, {admission}" if several else policy,
            mode="lines+markers",
            line={"dash": "dash"} if policy == "belady" else {},
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [100 * float(m["rate_max"]) - rate for m, rate in zip(line, rates, strict=True)],
                "arrayminus": [rate - 100 * float(m["rate_min"]) for m, rate in zip(line, rates, strict=True)],
            },
        )
    chart.add_hline(
        y=100 * result.theoretical,
        line={"dash": "dot"},
        annotation_text=f"theoretical {100 * result.theoretical:.2f} %",
    )
    chart.update_layout(
        title=f"{TITLE}<br><sup>sum(hit tokens) / sum(prompt tokens); bars: range over orders of the sessions</sup>",
        xaxis_title=f"capacity / live contexts ({result.live_contexts:,.0f} tokens)",
        yaxis_title="hit rate (%)",
        template="plotly_white",
    )
    return chart
