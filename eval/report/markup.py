"""Escaped text and tables as HTML: the only place where text becomes markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from eval.report.text import printable


def text(foreign: object) -> str:
    return escape(printable(str(foreign)))


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], left: int = 1) -> str:
    """Rows are (class, cells); cells are markup; the first ``left`` columns are text, the others numbers.

    A row of class "more" is one cell over the whole width: the definition of the row above it.
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = ("id" if i < left else "n" for i in range(len(values)))
        return "".join(f'<{tag} class="{k}">{v}</{tag}>' for k, v in zip(kinds, values, strict=True))

    def line(kind: str, values: Sequence[str]) -> str:
        if kind == "more":
            return f'<tr class="more"><td class="def" colspan="{len(columns)}">{values[0]}</td></tr>'
        return f'<tr class="{kind}">{cells("td", values)}</tr>'

    lines = "".join(line(kind, values) for kind, values in rows)
    head = cells("th", [escape(c) for c in columns])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
