"""The simulator's answers on the page; the curve is a figure."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.markup import table, text
from eval.report.schema_what_if import WhatIf
from eval.report.text_what_if import COLUMNS, TITLE, answers, cells, lines


def what_if(found: WhatIf) -> str:
    """The table of answers, and what it rests on."""
    rows: list[tuple[str, Sequence[str]]] = [
        ("", [text(cell) for cell in narrow(cells(answer, found))]) for answer in answers(found)
    ]
    told = "".join(f'<p class="dim">{text(line)}</p>' for line in (found.definition, *lines(found)))
    return f"<h2>{TITLE}</h2>" + (table(narrow(COLUMNS), rows) if rows else "") + told


def narrow(columns: Sequence[str]) -> list[str]:
    """Without the tokens saved, so that a phone shows all; they are in the JSON."""
    return [column for name, column in zip(COLUMNS, columns, strict=True) if name != "computed less"]
