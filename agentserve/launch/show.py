"""What the launch commands print."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agentserve.launch.facts import CheckpointFacts
from agentserve.launch.plan import LaunchPlan, served_planes
from agentserve.launch.preflight import Preflight
from agentserve.launch.process import Progress
from agentserve.launch.recipe import Recipe
from agentserve.runtime.index_reuse import IndexReuseError
from offload.state import StateError, bytes_per_token

_LINE_EVERY_S = 15.0  # progress where there is no terminal to redraw


def print_findings(console: Console, checked: Preflight) -> None:
    """One line a finding, errors first."""
    for finding in sorted(checked.findings, key=lambda finding: finding.level):
        colour = "red" if finding.level == "error" else "yellow"
        text = escape(f"{finding.what}. Fix: {finding.fix}.")
        console.print(f"[{colour}]{finding.level}[/]: {text}", soft_wrap=True)


def print_plan(
    console: Console,
    plan: LaunchPlan,
    recipe: Recipe,
    facts: CheckpointFacts | None,
    draft: CheckpointFacts | None = None,
) -> None:
    """The command exactly as it would be run, then what one cached token takes."""
    # Not through rich: a line that is to be copied must not be wrapped or coloured.
    console.file.write(f"cd {shlex.quote(str(plan.cwd))} && {plan.shell()}\n")
    for note in plan.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    if facts is None:
        console.print("bytes per token: unknown, the checkpoint cannot be read")
        return
    try:
        planes = served_planes(recipe, facts, draft)
    except (StateError, IndexReuseError) as error:
        console.print(f"bytes per token: unknown, {escape(str(error))}", soft_wrap=True)
        return
    table = Table(title="Cached prefix, per token and rank", title_justify="left")
    for title in ("plane", "type"):
        table.add_column(title)
    for title in ("layers", "heads", "head dim", "bytes"):
        table.add_column(title, justify="right")
    for plane in planes:
        numbers = (len(plane.layers), plane.heads_per_rank, plane.head_dim, plane.bytes_per_token)
        table.add_row(plane.name, plane.dtype, *(f"{number:,}" for number in numbers))
    total = bytes_per_token(planes)
    table.add_section()
    table.add_row("all", "", "", "", "", f"{total:,}")
    console.print(table)
    if recipe.kv.capacity_tokens is not None:
        capacity = recipe.kv.capacity_tokens
        console.print(f"KV cache: {capacity:,} tokens, {capacity * total / 1e9:.2f} GB on each of {recipe.tp} rank(s)")


@contextmanager
def starting(console: Console, log: Path) -> Iterator[Progress]:
    """A progress line while the server starts: elapsed seconds and the last line of its log."""
    if not console.is_terminal:
        console.print(f"starting the server, log: {log}", soft_wrap=True)
        last = time.monotonic()

        def print_line(elapsed: float, line: str) -> None:
            nonlocal last
            if time.monotonic() - last >= _LINE_EVERY_S:
                last = time.monotonic()
                console.print(escape(f"{elapsed:.0f} s: {line or 'it has said nothing yet'}"), soft_wrap=True)

        yield print_line
        return
    with console.status("starting the server") as status:

        def update(elapsed: float, line: str) -> None:
            width = max(20, console.width - 30)
            status.update(f"starting the server, {elapsed:.0f} s  [dim]{escape(line.strip()[:width])}[/]")

        yield update


def print_ready(console: Console, plan: LaunchPlan, recipe: Recipe, log: Path, seconds: float) -> None:
    """That the server is ready, where, and a request to try."""
    name = recipe.served_name or recipe.model
    body = {"model": name, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
    request = [
        "curl",
        f"{plan.url}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        orjson.dumps(body).decode(),
    ]
    console.print(f"ready after {seconds:.0f} s: {plan.url}/v1 (log: {escape(str(log))})", soft_wrap=True)
    console.file.write(f"try: {shlex.join(request)}\n")
    console.file.flush()
