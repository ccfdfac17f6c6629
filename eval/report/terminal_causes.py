"""The attribution on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.report.rich_table import plain_table
from eval.report.schema_causes import AttributionReport
from eval.report.text import changed, count, percent, points, share

_EVICTIONS_SHOWN = 8


def render_causes(found: AttributionReport, console: Console) -> None:
    console.print(_causes(found))
    if found.evictions:
        console.print(_evictions(found))
    console.print(Text(changed(found.context_changes)))


def _causes(found: AttributionReport) -> Table:
    table = plain_table("Why: from ideal to realized", f"{found.evidence.text} {share(found)}")
    table.add_column("cause", ratio=1)
    table.add_column("points", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    prompt = found.prompt_tokens
    table.add_row("ideal", percent(found.ideal_tokens / prompt), count(found.ideal_tokens), "")
    for row in found.causes:
        name = Text.assemble(f"- {row.title}\n", (row.definition, "dim"))
        table.add_row(name, points(-row.rate_difference), count(-row.tokens), count(row.requests))
    end = percent(found.realized_tokens / prompt)
    table.add_row(Text("realized", style="bold"), Text(end, style="bold"), count(found.realized_tokens), "")
    table.add_section()
    table.add_row("gap", points(-found.gap_tokens / prompt), count(-found.gap_tokens), "")
    return table


def _evictions(found: AttributionReport) -> Table:
    more = len(found.evictions) - _EVICTIONS_SHOWN
    table = plain_table("Evictions that cost a hit", f"{more} smaller rows are in the JSON." if more > 0 else None)
    table.add_column("memory needed for", ratio=1)
    table.add_column("the conversation that lost it was", ratio=1)
    table.add_column("tokens", justify="right", no_wrap=True)
    for row in found.evictions[:_EVICTIONS_SHOWN]:
        tier = "" if row.cause == "evicted" else " (in the offload tier)"
        table.add_row(Text(row.by_title + tier), Text(row.victim_title), count(row.tokens))
    return table
