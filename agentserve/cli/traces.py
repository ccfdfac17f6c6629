"""``agentserve traces``: options and tables; the work is in ``eval.bench.theory_scan`` and ``traces.statistics``."""

from __future__ import annotations

import math
from typing import Any, cast

import click
from rich.console import Console
from rich.table import Column, Table

from agentserve.cli import trace_files
from agentserve.cli.trace_input import TraceInput, as_json_option, print_json, reported, with_trace
from eval.bench.theory_scan import Scope, TheoryResult, scan_trace
from traces.model import ReadStats
from traces.statistics import BEGINNING_TURNS, FAR_BACK, PERCENTILES, Distribution, TraceStatistics


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Inspect and convert traces: a file, a directory, an archive, or generated:sessions=20,seed=1."""


for _command in trace_files.COMMANDS:
    command.add_command(_command)


@command.command()
@with_trace
@as_json_option
@click.option("--page", "pages", type=click.IntRange(min=1), multiple=True, default=(64,), show_default=True,
              help="Tokens per page; give it several times for several sizes.")  # fmt: skip
@click.option("--scope", type=click.Choice(["session", "tools+system"]), default="session", show_default=True,
              help="Whether sessions share the tools + system head of their prompts.")  # fmt: skip
@click.option("--no-output", is_flag=True, help="Generated tokens are not inserted into the cache.")
def theory(trace: TraceInput, as_json: bool, pages: tuple[int, ...], scope: str, no_output: bool) -> None:
    """Theoretical prefix-cache hit rate of all sessions, in one pass."""
    page_sizes = list(dict.fromkeys(pages))
    kind = cast(Scope, scope)
    result = reported(
        lambda: scan_trace(trace.sessions(), page_sizes=page_sizes, scope=kind, output_inserted=not no_output)
    )
    trace.tell_skipped()
    stats = trace.stats
    if as_json:
        print_json(_theory_json(trace.path, result, stats))
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
@with_trace
@as_json_option
def statistics(trace: TraceInput, as_json: bool) -> None:
    """Turns, contexts, how prompts change, gaps by stop reason, duplicates."""
    found = TraceStatistics()

    def read_all() -> None:
        for session in trace.sessions():
            found.add(session)

    reported(read_all)
    trace.tell_skipped()
    if not found.sessions:
        raise click.ClickException(f"{trace.path}: no session could be read")
    if as_json:
        print_json(_statistics_json(trace.path, found, trace.stats))
    else:
        _print_statistics(found, trace.stats)


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
