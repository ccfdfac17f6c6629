"""Is the share that gittins closes luck? Shares as in ``eval.bench.policy_table``, over many orders of sessions.

    python -m eval.bench.policy_noise TRACES/weka-claude-code.tar.xz --orders 8

For each half of the sessions and each service model: the part of what Belady's rule wins over LRU that gittins wins
too, order by order, their mean, standard deviation and the standard error of the mean. Halves that differ by more than
their errors differ in what their sessions do, not in the order that was drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from eval.bench.policy_table import OWN, Plan, halves
from eval.bench.simulator_grid import BELADY, Axes, closed_share, run_grid
from radix_cache.simulator import Service, Setting, Workload
from traces.model import TraceError
from traces.readers import open_trace


def spread(workload: Workload, service: Service, capacity: str, orders: int) -> dict[str, Any]:
    """Shares in percent by order, and what their mean is worth.

    Raises:
        ValueError: an order in which Belady's rule wins nothing over LRU; there is no share to speak of.
    """
    base = Setting(sessions=Plan.sessions, think_cap=Plan.think_cap, service=service)
    own = OWN[service]
    rows = run_grid(workload, Axes(("lru", own, BELADY), (capacity,), orders=orders), base).rows
    shares = []
    for order in range(orders):
        share = closed_share([r for r in rows if r.order == order], own, capacity)
        if share is None:
            raise ValueError(f"at {capacity} nothing is to be won over lru in order {order}; choose a smaller capacity")
        shares.append(100 * share)
    deviation = stdev(shares)
    return {
        "policy": own,
        "mean": round(fmean(shares), 1),
        "deviation": round(deviation, 1),
        "error_of_mean": round(deviation / orders**0.5, 1),
        "by_order": [round(share, 1) for share in shares],
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("path")
@click.option("--capacity", default="1.0x", help="Tokens, or a multiple of the live contexts.")
@click.option("--orders", type=click.IntRange(min=2), default=8, help="Random orders of the sessions.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the result as JSON.")
def main(path: str, capacity: str, orders: int, out: Path | None) -> None:
    """Print how the shares of the trace PATH vary with the order of its sessions."""
    try:
        workloads = halves(open_trace(path))
        found = {
            service.name.lower(): {half: spread(workloads[half], service, capacity, orders) for half in workloads}
            for service in OWN
        }
    except (TraceError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    table = Table(title=f"Closed of what belady wins over lru at {capacity}, in %, {orders} orders")
    for name in ("service", "half", "policy", "mean", "deviation", "error of mean", "by order"):
        table.add_column(name)
    for service, by_half in found.items():
        for half, line in by_half.items():
            by_order = " ".join(map(str, line["by_order"]))
            values = (line["mean"], line["deviation"], line["error_of_mean"])
            table.add_row(service, half, line["policy"], *map(str, values), by_order)
    Console().print(table)
    if out is not None:
        options = f"--capacity {capacity} --orders {orders}"
        command = f"python -m eval.bench.policy_noise {Path(path).name} {options}"
        out.write_text(json.dumps({"command": command, "shares": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
