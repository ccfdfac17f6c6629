"""A comparison as GitHub-flavoured Markdown, for a pull request."""

from __future__ import annotations

from eval.compare.schema import Comparison, Pairing
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
from eval.report.markdown import plain, table
from eval.report.text import count


def render_comparison_markdown(result: Comparison) -> str:
    """What the terminal shows; all server arguments are in the JSON."""
    parts = [
        f"# Comparison of {len(result.runs)} runs",
        "\n".join(f"- **{plain(line)}**" for line in verdicts(result)),
        "\n".join(f"> **{label(doubt)}:** {plain(told(doubt))}" for doubt in result.doubts),
        _sides(result),
        *(_pairing(result.runs[0].name, pairing, result.interval) for pairing in result.pairings),
        _arguments(result),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _sides(result: Comparison) -> str:
    runs = result.runs
    rows = [*rate_rows(runs), *time_rows(runs)]
    marked = [(f"**{name}**" if name == "realized hit rate" else name, *values) for name, values in rows]
    cells = table(("", *(plain(run.name) for run in runs)), marked)
    return f"## Side by side\n\nOver the {count(runs[0].paired)} requests that all runs completed.\n\n{cells}"


def _pairing(first: str, pairing: Pairing, interval: str) -> str:
    rows = []
    for row in pairing.differences:
        one, other, difference, bounds = difference_cells(row)
        rows.append((row.title, one, other, f"**{difference}**" if is_clear(row) else difference, bounds))
    cells = table(("", "first", "other", "difference", "95 % interval"), rows)
    return f"## {plain(title(first, pairing))}\n\n{cells}\n\n{plain(paired_as(pairing))} {plain(interval)}"


def _arguments(result: Comparison) -> str:
    rows = list(result.server_differences.items())
    if not rows:
        return ""
    cells = table(
        ("argument", *(plain(run.name) for run in result.runs)),
        [(plain(name), *(plain(value[:60]) for value in values)) for name, values in rows[:ARGUMENTS_SHOWN]],
    )
    more = len(rows) - ARGUMENTS_SHOWN
    return f"## Server arguments that differ\n\n{cells}" + (f"\n\n{more} more are in the JSON." if more > 0 else "")
