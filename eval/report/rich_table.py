"""The look of every table of the terminal."""

from __future__ import annotations

from rich import box
from rich.table import Table


def plain_table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        caption_style="dim",
        expand=True,
        padding=(0, 1, 0, 0),
    )
