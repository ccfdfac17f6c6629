"""``agentserve traces``: options and tables; the work is in ``eval.bench.theory_scan`` and ``traces.statistics``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import click
import orjson
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from eval.bench.theory_scan import Scope, TheoryResult, scan_trace
from traces.model import ReadStats, Session, TraceError
from traces.readers import format_names, open_trace
from traces.statistics import BEGINNING_TURNS, FAR_BACK, PERCENTILES, Distribution, TraceStatistics

_MESSAGES_SHOWN = 5

_input_options = [
    click.argument("path"),
    click.option("--format", "trace_format", type=click.Choice(format_names()), help="Format of PATH, if unclear."),
    click.option("--skip-bad", is_flag=True, help="Pass over faulty sessions, and say which."),
    click.option("--limit", type=click.IntRange(min=1), help="Read at most this many sessions."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table."),
]


def _with_input(function: Any) -> Any:
    for option in reversed(_input_options):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Inspect traces: a file, a directory, an archive, or generated:sessions=20,seed=1."""


@command.command()
@_with_input
@click.option("--page", "pages", type=click.IntRange(min=1), multiple=True, default=(64,), show_default=True,
              help="Tokens per page; give it several times for several sizes.")  # fmt: skip
@click.option("--scope", type=click.Choice(["session", "tools+system"]), default="session", show_default=True,
              help="Whether sessions share the tools + system head of their prompts.")  # fmt: skip
@click.option("--no-output", is_flag=True, help="Generated tokens are not inserted into the cache.")
def theory(
    path: str,
    trace_format: str | None,
    skip_bad: bool,
    limit: int | None,
    as_json: bool,
    pages: tuple[int, ...],
    scope: str,
    no_output: bool,
) -> None:
    """Theoretical prefix-cache hit rate of all sessions, in one pass."""
    stats = ReadStats()
    sessions = _read(path, trace_format, skip_bad, limit, stats)
    page_sizes = list(dict.fromkeys(pages))
    result = _reported(
        lambda: scan_trace(sessions, page_sizes=page_sizes, scope=cast(Scope, scope), output_inserted=not no_output)
    )
    _tell_skipped(stats)
    if as_json:
        _print_json(_theory_json(path, result, stats))
        return
    console = Console()
    console.print(f"Theoretical hit rate: {_definition(result)}", highlight=False)
    table = Table("page", "rate", "hit tokens", "mean of per-request rates (another number)")
    for page, rate in result.rates.items():
        mean = result.mean_of_rates[page]
        table.add_row(f"{page:,}", f"{rate.rate:.2%}", f"{rate.hit_tokens:,}", f"{mean:.2%}")
    console.print(table)
    console.print(
        f"{result.sessions:,} sessions, {stats.requests:,} requests, {stats.prompt_tokens:,} prompt tokens; "
        f"{result.seconds:.1f} s ({result.cpu_seconds:.1f} s of processor time), "
        f"peak memory {result.peak_rss_bytes / 2**20:.0f} MiB",
        highlight=False,
    )


@command.command("stats")
@_with_input
def statistics(path: str, trace_format: str | None, skip_bad: bool, limit: int | None, as_json: bool) -> None:
    """Turns, contexts, how prompts change, gaps by stop reason, duplicates."""
    stats = ReadStats()
    found = TraceStatistics()

    def read_all() -> None:
        for session in _read(path, trace_format, skip_bad, limit, stats):
            found.add(session)

    _reported(read_all)
    _tell_skipped(stats)
    if not found.sessions:
        raise click.ClickException(f"{path}: no session could be read")
    if as_json:
        _print_json(_statistics_json(path, found, stats))
    else:
        _print_statistics(found, stats)


def _read(
    path: str, trace_format: str | None, skip_bad: bool, limit: int | None, stats: ReadStats
) -> Iterator[Session]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading")
        for session in open_trace(path, format=trace_format, skip_bad=skip_bad, limit=limit, stats=stats):
            progress.update(task, description=f"{stats.sessions:,} sessions, {stats.requests:,} requests")
            yield session


def _reported(work: Any) -> Any:
    try:
        return work()
    except TraceError as error:
        raise click.ClickException(str(error)) from error


def _tell_skipped(stats: ReadStats) -> None:
    lists = (("skipped", stats.skipped), ("accepted", stats.notes))
    for word, messages in lists:
        for message in messages[:_MESSAGES_SHOWN]:
            click.echo(f"{word}: {message}", err=True)
        if len(messages) > _MESSAGES_SHOWN:
            click.echo(f"{word}: {len(messages) - _MESSAGES_SHOWN:,} more", err=True)


def _definition(result: TheoryResult) -> str:
    """What the printed rate is, in a sentence."""
    if result.global_ids:
        shared = "whole blocks are shared between all requests (global ids), generated tokens cannot be told"
    else:
        shared = "per session" if result.scope == "session" else "sessions share the tools + system head"
        shared += ", generated tokens " + ("inserted" if result.output_inserted else "not inserted")
    return (
        f"sum of hit tokens / sum of prompt tokens; infinite cache, instant insertion; {shared}; only whole "
        "pages hit, and at most prompt - 1 tokens (docs/definitions.md)."
    )


def _theory_json(path: str, result: TheoryResult, stats: ReadStats) -> dict[str, Any]:
    return {
        "trace": path,
        "definition": _definition(result),
        "scope": "global ids" if result.global_ids else result.scope,
        "output_inserted": result.output_inserted and not result.global_ids,
        "pages": {
            str(page): {
                "rate": rate.rate,
                "hit_tokens": rate.hit_tokens,
                "mean_of_request_rates": result.mean_of_rates[page],
            }
            for page, rate in result.rates.items()
        },
        "sessions": result.sessions,
        "requests": stats.requests,
        "prompt_tokens": stats.prompt_tokens,
        "skipped": stats.skipped,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "peak_rss_bytes": result.peak_rss_bytes,
    }


def _print_statistics(found: TraceStatistics, stats: ReadStats) -> None:
    console = Console()
    console.print(
        f"{found.sessions:,} sessions, {found.requests:,} requests, {found.prompt_tokens:,} prompt and "
        f"{found.output_tokens:,} output tokens; {found.subagents:,} subagents in "
        f"{found.sessions_with_subagents:,} sessions; {len(stats.skipped):,} sessions skipped",
        highlight=False,
    )
    lengths = Table(
        Column("main flows", no_wrap=True), "mean", *(f"p{p}" for p in PERCENTILES), title="Lengths (turns, tokens)"
    )
    for name, values in found.distributions().items():
        lengths.add_row(name, *_cells(values))
    console.print(lengths)
    gaps = Table(Column("stop", no_wrap=True), "turns", "last", "mean", *(f"p{p}" for p in PERCENTILES),
                 title="Seconds from an answer to the next turn (last: it ended the session)")  # fmt: skip
    for stop, ending in found.endings().items():
        share = f"{ending.ended_session / ending.turns:.1%}"
        gaps.add_row(stop.value or "(none)", f"{ending.turns:,}", share, *_cells(ending.gap_s))
    console.print(gaps)
    pairs = max(1, found.pairs)
    repeated = found.duplicates()
    console.print(
        f"{found.appending / pairs:.1%} of turns only append; {found.pulling_back / pairs:.1%} lose more than "
        f"{FAR_BACK:.0%} of the previous prompt; {found.overlapping:,} start before their predecessor ended\n"
        f"{repeated.identical:,} sessions are copies of an earlier one; {repeated.prefixes:,} are the beginning "
        f"of a longer one; {repeated.same_beginning:,} have the first {BEGINNING_TURNS} turns of an earlier one",
        highlight=False,
    )


def _statistics_json(path: str, found: TraceStatistics, stats: ReadStats) -> dict[str, Any]:
    return {"trace": path, **found.summary(), "skipped": stats.skipped, "notes": stats.notes}


def _cells(values: Distribution) -> list[str]:
    return [_short(number) for number in (values.mean, *values.percentiles.values())]


def _short(number: float) -> str:
    """At most six characters, so that a row fits 80 columns."""
    if math.isnan(number):
        return "-"
    return f"{number:,.0f}" if number < 9_999.5 else f"{number / 1000:,.1f}k"


def _print_json(document: dict[str, Any]) -> None:
    click.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())
