"""What all commands on traces share: the options that name a trace, reading it with progress, errors and messages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import orjson
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from traces.model import ReadStats, Session, TraceError
from traces.readers import format_names, open_trace
from traces.text import load_tokenizer

Result = TypeVar("Result")

_MESSAGES_SHOWN = 5

_OPTIONS = [
    click.argument("path"),
    click.option("--format", "trace_format", type=click.Choice(format_names()), help="Format of PATH, if unclear."),
    click.option("--skip-bad", is_flag=True, help="Pass over faulty sessions, and say which."),
    click.option("--limit", type=click.IntRange(min=1), help="Read at most this many sessions."),
    click.option("--tokenizer", type=click.Path(path_type=Path), metavar="DIR",
                 help="Checkpoint of the served model; formats that hold text need its tokenizer."),
]  # fmt: skip


@dataclass
class TraceInput:
    """A trace as named on the command line, and what was seen of it so far."""

    path: str
    trace_format: str | None
    skip_bad: bool
    limit: int | None
    tokenizer: Path | None
    stats: ReadStats = field(default_factory=ReadStats)

    def sessions(self) -> Iterator[Session]:
        """Stream the sessions, with progress on a terminal; every call starts anew and counts anew.

        Raises:
            TraceError: while iterating, for a faulty session or trace.
            click.ClickException: there is no tokenizer in the named folder.
        """
        try:
            tokenizer = None if self.tokenizer is None else load_tokenizer(self.tokenizer)
        except (ValueError, OSError) as error:
            raise click.ClickException(f"--tokenizer: {error}") from error
        self.stats = stats = ReadStats()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        console = Console(stderr=True)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("reading")
            trace = open_trace(
                self.path,
                format=self.trace_format,
                skip_bad=self.skip_bad,
                limit=self.limit,
                stats=stats,
                tokenizer=tokenizer,
            )
            for session in trace:
                progress.update(task, description=f"{stats.sessions:,} sessions, {stats.requests:,} requests")
                yield session

    def tell_skipped(self) -> None:
        """Say on stderr which sessions were skipped, and which oddities accepted."""
        for word, messages in (("skipped", self.stats.skipped), ("accepted", self.stats.notes)):
            for message in messages[:_MESSAGES_SHOWN]:
                click.echo(f"{word}: {message}", err=True)
            if len(messages) > _MESSAGES_SHOWN:
                click.echo(f"{word}: {len(messages) - _MESSAGES_SHOWN:,} more", err=True)


def with_trace(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that name a trace; it gets them as one ``trace``."""

    @functools.wraps(function)
    def command(
        path: str, trace_format: str | None, skip_bad: bool, limit: int | None, tokenizer: Path | None, **others: Any
    ) -> None:
        function(trace=TraceInput(path, trace_format, skip_bad, limit, tokenizer), **others)

    for option in reversed(_OPTIONS):
        command = option(command)
    return command


as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def reported(work: Callable[[], Result]) -> Result:
    """Do it; a faulty trace ends the command with its message."""
    try:
        return work()
    except TraceError as error:
        raise click.ClickException(str(error)) from error


def print_json(document: dict[str, Any]) -> None:
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())
