"""A comparison as rich tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.compare.schema import Comparison, Difference, Pairing, RunSide
from eval.report.rich_table import plain_table
from eval.report.text import count, per_second, percent, points, printable, seconds
from radix_cache.attribution.causes import TITLES, Cause

_ARGUMENTS_SHOWN = 12


def render_comparison(result: Comparison, console: Console) -> None:
    for doubt in result.doubts:
        style = "bold red" if doubt.level == "refuse" else "bold yellow"
        label = "Not comparable" if doubt.level == "refuse" else "Differs"
        console.print(
            Text.assemble((f"{label}: ", style), printable(f"{doubt.what} ({' / '.join(doubt.values)}): {doubt.text}."))
        )
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
    table.add_row("ideal hit rate", *(percent(run.ideal_rate) for run in runs))
    table.add_row(Text("realized hit rate", style="bold"), *(percent(run.realized_rate) for run in runs))
    for cause in Cause:
        if any(cause.value in run.causes for run in runs):
            table.add_row(
                f"- {TITLES[cause]}, points",
                *(points(-run.causes.get(cause.value, 0) / run.prompt_tokens) for run in runs),
            )
    table.add_row("cache events", *("yes" if run.evidence == "events" else "no" for run in runs))
    table.add_section()
    for title, name in (("TTFT p50", "ttft_p50_s"), ("TTFT p95", "ttft_p95_s"), ("TPOT p50", "tpot_p50_s"),
                        ("E2E p50", "e2e_p50_s")):  # fmt: skip
        table.add_row(title, *(seconds(getattr(run, name)) for run in runs))
    table.add_row("output tokens/s, whole run", *(per_second(run.output_tokens_per_s) for run in runs))
    table.add_row("recorded / failed, whole run", *(f"{count(run.recorded)} / {count(run.failed)}" for run in runs))
    return table


def _pairing(first: str, pairing: Pairing, interval: str) -> Table:
    alike = f"Same answers: {count(pairing.same_answers)} of {count(pairing.answers)}."
    lengths = "" if pairing.same_lengths else " Prompts differ in length."
    left = f" Not paired: {count(pairing.only_first)} and {count(pairing.only_other)}."
    table = plain_table(
        printable(f"{pairing.name} less {first}, {count(pairing.requests)} paired requests"),
        f"{interval} {alike}{lengths}{left}",
    )
    table.add_column("", ratio=1)
    for name in ("first", "other", "difference", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in pairing.differences:
        low, high = row.low, row.high
        bounds = "-" if low is None or high is None else f"{_signed(row, low)} .. {_signed(row, high)}"
        clear = low is not None and high is not None and not low <= 0 <= high
        table.add_row(
            row.title,
            _plain(row, row.first),
            _plain(row, row.other),
            Text(_signed(row, row.difference), style="bold" if clear else ""),
            bounds,
        )
    return table


def _plain(row: Difference, value: float) -> str:
    if row.unit == "fraction":
        return percent(value)
    return seconds(value) if row.unit == "seconds" else f"{value:,.1f}"


def _signed(row: Difference, value: float) -> str:
    if row.unit == "fraction":
        return points(value)
    sign = "+" if value >= 0 else ""
    return sign + (seconds(value) if row.unit == "seconds" else f"{value:,.1f}")


def _arguments(result: Comparison) -> Table:
    rows = list(result.server_differences.items())
    more = len(rows) - _ARGUMENTS_SHOWN
    table = plain_table("Server arguments that differ", f"{more} more are in the JSON." if more > 0 else None)
    table.add_column("argument", ratio=1)
    for run in result.runs:
        table.add_column(printable(run.name), justify="right", max_width=30)
    for name, values in rows[:_ARGUMENTS_SHOWN]:
        table.add_row(printable(name), *(printable(value)[:60] for value in values))
    return table
