"""A comparison as rich tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.compare.schema import Comparison, Pairing, RunSide
from eval.compare.text import (
    ARGUMENTS_SHOWN,
    difference_cells,
    is_clear,
    label,
    paired_as,
    rate_rows,
    time_rows,
    title,
    told,
    verdicts,
)
from eval.report.rich_table import plain_table
from eval.report.text import count, printable


def render_comparison(result: Comparison, console: Console) -> None:
    for line in verdicts(result):
        console.print(Text(printable(line), style="bold"))
    for doubt in result.doubts:
        style = "bold red" if doubt.level == "refuse" else "bold yellow"
        console.print(Text.assemble((f"{label(doubt)}: ", style), printable(told(doubt))))
    console.print(_sides(result.runs))
    for pairing in result.pairings:
        console.print(_pairing(result.runs[0].name, pairing, result.interval))
    if result.server_differences:
        console.print(_arguments(result))


def _sides(runs: list[RunSide]) -> Table:
    table = plain_table("Side by side", f"Over the {count(runs[0].paired)} requests that all runs completed.")
    table.add_column("", ratio=1)
    for run in runs:
        table.add_column(printable(run.name), justify="right")
    for name, values in rate_rows(runs):
        table.add_row(Text(name, style="bold" if name == "realized hit rate" else ""), *values)
    table.add_section()
    for name, values in time_rows(runs):
        table.add_row(name, *values)
    return table


def _pairing(first: str, pairing: Pairing, interval: str) -> Table:
    table = plain_table(printable(title(first, pairing)), f"{interval} {paired_as(pairing)}")
    table.add_column("", ratio=1)
    for name in ("first", "other", "difference", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in pairing.differences:
        one, other, difference, bounds = difference_cells(row)
        table.add_row(row.title, one, other, Text(difference, style="bold" if is_clear(row) else ""), bounds)
    return table


def _arguments(result: Comparison) -> Table:
    rows = list(result.server_differences.items())
    more = len(rows) - ARGUMENTS_SHOWN
    table = plain_table("Server arguments that differ", f"{more} more are in the JSON." if more > 0 else None)
    table.add_column("argument", ratio=1)
    for run in result.runs:
        table.add_column(printable(run.name), justify="right", max_width=30)
    for name, values in rows[:ARGUMENTS_SHOWN]:
        table.add_row(printable(name), *(printable(value)[:60] for value in values))
    return table
