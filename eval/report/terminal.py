"""The report as rich tables, for 80 columns and up."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from eval.report.advice import advice
from eval.report.rich_table import plain_table
from eval.report.schema import Report
from eval.report.terminal_causes import render_causes
from eval.report.terminal_what_if import render_what_if
from eval.report.text import (
    AUDIT_CAPTION,
    accepted,
    audit_cells,
    by_tier,
    count,
    headline,
    percent,
    points,
    printable,
    progress,
    seconds,
    shortened,
    speed,
    within,
)

SESSIONS_SHOWN = 10
WORST_SHOWN = 5
_WIDE = 100  # columns from which the latency table has room for every percentile


def render_terminal(report: Report, console: Console) -> None:
    """Prints the report. Text from records is printed as is, never as markup."""
    wide = console.width >= _WIDE
    run = report.run
    _answer(report, console)
    console.print(Text(f"Run {printable(run.run_id)}", style="bold"))
    console.print(Text(printable(report.data_set.line)))
    engine = f"{run.client} {run.engine_version or ''}".rstrip()
    console.print(
        Text(
            printable(
                f"{run.model or 'model unknown'} at {run.base_url} ({engine}); page {report.page_size.tokens}"
                f" ({report.page_size.source}); concurrency {run.concurrency}; history {run.history}; started"
                f" {run.started}"
            )
        )
    )
    done = report.completeness
    console.print(Text(progress(done)))
    if done.banner:
        console.print(Panel(Text(done.banner, style="bold"), border_style="red", title="Incomplete run"))
    console.print(_rates(report))
    if report.attribution is None:
        console.print(_chain(report))
    else:
        render_causes(report.attribution, console)
    if report.tiers is not None:
        console.print(Text(by_tier(report.tiers)))
    console.print(_latency(report, wide))
    console.print(_speed(report))
    if report.what_if is not None:
        render_what_if(report.what_if, console)
    if report.audit:
        console.print(_audit(report))
    console.print(_sessions(report))
    if report.worst:
        console.print(_worst(report))
    if report.errors:
        console.print(_errors(report))
    for note in report.notes:
        console.print(Text.assemble(("Note: ", "bold yellow"), printable(note)))
    _answer(report, console)  # once more: the first screen has scrolled away


def _answer(report: Report, console: Console) -> None:
    console.print(Text(headline(report), style="bold green"))
    for line in advice(report):
        console.print(Text(printable(line)))


def _audit(report: Report) -> Table:
    table = plain_table("Fast paths", AUDIT_CAPTION)
    for title in ("path", "configured", "eligible", "executed", "verdict"):
        table.add_column(
            title, justify="right" if title == "executed" else "left", ratio=1 if title == "path" else None
        )
    for line in report.audit:
        table.add_row(*(Text(printable(cell)) for cell in audit_cells(line)))
    return table


def _named(title: str, definition: str, *, strong: bool = False) -> Text:
    return Text.assemble((title, "bold" if strong else ""), "\n", (definition, "dim"))


def _rates(report: Report) -> Table:
    table = plain_table("Hit rate", f"{report.rate_definition} {report.population.text}")
    table.add_column("definition", ratio=1)
    table.add_column("rate", justify="right", no_wrap=True)
    table.add_column("hit tokens", justify="right", no_wrap=True)
    for rate in report.rates:
        strong = rate.key in ("aligned", "realized")
        value = Text(percent(rate.rate), style="bold green" if rate.key == "realized" else "")
        table.add_row(_named(rate.title, rate.definition, strong=strong), value, count(rate.hit_tokens))
    table.add_section()
    table.add_row(Text("prompt tokens", style="dim"), "", Text(count(report.population.prompt_tokens), style="dim"))
    for mean in report.mean_rates:
        last = mean is report.mean_rates[-1]
        title = _named(mean.title, mean.definition) if last else Text(mean.title)
        table.add_row(title, Text(percent(mean.mean), style="dim"), "")
    return table


def _chain(report: Report) -> Table:
    chain = report.chain
    table = plain_table(f"Where the hits go: ideal to {chain.end_key}", "The steps sum to the gap exactly, in tokens.")
    table.add_column("step", ratio=1)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("lost / gained", justify="right")
    prompt = chain.prompt_tokens
    table.add_row("ideal", percent(chain.ideal_tokens / prompt), count(chain.ideal_tokens), "")
    for step in chain.steps:
        parts = f"{count(step.lost_tokens)} / {count(step.gained_tokens)}"
        table.add_row(f"- {step.title}", points(-step.rate_difference), count(-step.tokens), parts)
    end = percent(chain.end_tokens / prompt)
    table.add_row(Text(chain.end_key, style="bold"), Text(end, style="bold"), count(chain.end_tokens), "")
    table.add_section()
    table.add_row("gap", points(-chain.gap_tokens / prompt), count(-chain.gap_tokens), "")
    return table


def _latency(report: Report, wide: bool) -> Table:
    table = plain_table("Latency", "\n".join(report.latency_definitions.values()))
    table.add_column("", no_wrap=True)
    table.add_column("requests", no_wrap=True)
    table.add_column("n", justify="right", no_wrap=True)
    names = ("p50", "p90", "p95", "p99", "mean", "max") if wide else ("p50", "p90", "p99", "mean", "max")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.latency:
        values = [seconds(getattr(row, name)) for name in names]
        style = "" if row.group == "all" else "dim"
        title = row.title if row.group == "all" else ""
        table.add_row(title, row.group, count(row.requests), *values, style=style)
    return table


def _speed(report: Report) -> Text:
    text = Text.assemble(("Throughput ", "bold"), speed(report.throughput))
    if report.goodput is not None:
        text.append("\nGoodput ", "bold").append(within(report.goodput), "not bold")
    if report.drafting is not None:
        text.append("\nDrafts ", "bold").append(printable(accepted(report.drafting)), "not bold")
    return text


def _sessions(report: Report) -> Table:
    shown = report.sessions[:SESSIONS_SHOWN]
    more = len(report.sessions) - len(shown)
    table = plain_table(
        "Sessions, largest gap first",
        "Gap = theoretical (page-aligned) - realized." + (f" {more:,} more in the JSON and the page." if more else ""),
    )
    table.add_column("session", ratio=1, no_wrap=True)
    for name in ("requests", "prompt", "theory", "realized", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(
            Text(shortened(row.session, 28)),
            count(row.requests),
            count(row.prompt_tokens),
            percent(row.theoretical_rate),
            percent(row.realized_rate),
            count(row.gap_tokens),
        )
    return table


def _worst(report: Report) -> Table:
    table = plain_table("Requests with the largest gap", "Tokens. Gap = theoretical (page-aligned) - realized.")
    table.add_column("session / flow / turn", ratio=1, no_wrap=True)
    for name in ("prompt", "theory", "ready", "realized", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in report.worst[:WORST_SHOWN]:
        table.add_row(
            Text(f"{shortened(row.session, 16)}/{shortened(row.flow, 10)}/{row.turn}"),
            count(row.prompt_tokens),
            count(row.theoretical_tokens),
            count(row.ready_tokens),
            count(row.realized_tokens),
            count(row.gap_tokens),
        )
    return table


def _errors(report: Report) -> Table:
    table = plain_table("Failed requests (in no rate and no latency)")
    table.add_column("kind", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("first message", ratio=1)
    for row in report.errors:
        table.add_row(row.kind, count(row.requests), Text(printable(row.example)))
    return table
