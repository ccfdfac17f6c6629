"""Results of a simulator grid as a terminal table, CSV, Parquet and one HTML page."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import plotly.graph_objects as go
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from rich.table import Table

from eval.bench.simulator_grid import Result, mean_over_orders

TITLE = "Prefix-cache hit rate by capacity"


def table(result: Result) -> Table:
    """Hit rate by capacity, one line a policy and admission; means over the orders, in percent."""
    means = mean_over_orders(result.rows)
    capacities = list(dict.fromkeys(str(m["capacity"]) for m in means))
    shown = Table(
        title=f"Hit rate in %, theoretical {100 * result.theoretical:.2f}; "
        f"1.0x is {result.live_contexts:,.0f} tokens, the mean of the live contexts",
        caption="sum(hit tokens) / sum(prompt tokens), device cache; host tier after a plus sign",
    )
    shown.add_column("policy")
    shown.add_column("admission")
    for capacity in capacities:
        shown.add_column(capacity, justify="right")
    shown.add_column("requests/s", justify="right")
    shown.add_column("wait, start wait (s)", justify="right")
    for policy, admission in dict.fromkeys((str(m["policy"]), str(m["admission"])) for m in means):
        line = {str(m["capacity"]): m for m in means if (m["policy"], m["admission"]) == (policy, admission)}
        cells = [_rate(line[c]) for c in capacities]
        speeds = " ".join(f"{line[c]['requests_per_s']:.3f}" for c in capacities)
        waits = " ".join(f"{line[c]['wait_mean']:.1f},{line[c]['start_wait_mean']:.0f}" for c in capacities)
        shown.add_row(policy, admission, *cells, speeds, waits)
    return shown


def _rate(mean: dict[str, float | str]) -> str:
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
