"""The audit on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.markup import escape
from rich.table import Table

from agentserve.audit.row import AuditRow

_COLOURS = {"runs": "green", "off": "dim", "not eligible": "yellow", "not executed": "red", "not proven": "yellow"}


def audit_table(rows: Iterable[AuditRow]) -> Table:
    """The audit as a table: a path a row, and under each answer what it rests on."""
    table = Table(title="Fast paths: configured, eligible, executed", title_justify="left", show_lines=True)
    for title in ("path", "configured", "eligible", "executed", "verdict"):
        # Names of counters are longer than a column: folded, one can still be copied.
        table.add_column(title, overflow="fold")
    for row in rows:
        executed = "-" if row.executed is None else f"{row.executed:,.0f}"
        table.add_row(
            row.path,
            _cell(f"{_word(row.configured)}:", row.setting),
            _cell(f"{_word(row.eligible)}:", row.condition),
            _cell(executed, row.counter),
            f"[{_COLOURS[row.verdict]}]{row.verdict}[/]",
        )
    return table


def _cell(answer: str, reason: str) -> str:
    return f"[bold]{answer}[/] [dim]{escape(reason)}[/]"


def _word(answer: bool | None) -> str:
    return "?" if answer is None else "yes" if answer else "no"
