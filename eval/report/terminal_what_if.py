"""The simulator's answers on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.report.rich_table import plain_table
from eval.report.schema_what_if import WhatIf
from eval.report.text import percent, printable
from eval.report.text_what_if import COLUMNS, TITLE, answers, cells, lines


def render_what_if(found: WhatIf, console: Console) -> None:
    """Curve and answers."""
    console.print(_curve(found))
    shown = answers(found)
    if shown:
        table = plain_table(TITLE, printable(f"{found.definition} {' '.join(lines(found))}"))
        table.add_column(COLUMNS[0], ratio=1)
        for name in COLUMNS[1:]:
            table.add_column(name, justify="right")
        for answer in shown:
            table.add_row(*(Text(cell) for cell in cells(answer, found)))
        console.print(table)
    else:
        console.print(Text(printable(" ".join(lines(found)))))


def _curve(found: WhatIf) -> Table:
    """One line a size; the run's own is marked."""
    policies = list(dict.fromkeys(name for point in found.curve for name in point.rates))
    table = plain_table("Hit rate by cache size, simulated", f"Theoretical: {percent(found.theoretical_rate)}.")
    table.add_column("capacity, tokens", ratio=1)
    table.add_column("of live contexts", justify="right")
    for policy in policies:
        table.add_column(policy, justify="right", no_wrap=True)
    for point in found.curve:
        own = point.capacity_tokens == found.capacity_tokens
        name = f"{point.capacity_tokens:,}{'  <- this run' if own else ''}"
        rates = (percent(point.rates.get(policy)) for policy in policies)
        table.add_row(Text(name), f"{point.of_live:.2f}", *rates, style="bold" if own else "")
    return table
