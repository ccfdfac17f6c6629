"""``agentserve simulate``: options and progress; the work is in ``eval.bench.simulator_*``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from eval.bench.simulator_grid import BELADY, Axes, Result, parse_capacity, run_grid
from eval.bench.simulator_output import shown, write
from eval.bench.simulator_workload import workload_from_sessions
from radix_cache.admission import admission_names, admission_policy
from radix_cache.eviction import eviction_names, eviction_policy
from radix_cache.simulator import Service, Setting, Workload
from traces.model import ReadStats, Session, TraceError
from traces.readers import format_names, open_trace


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path")
@click.option("--format", "trace_format", type=click.Choice(format_names()), help="Format of PATH, if unclear.")
@click.option("--skip-bad", is_flag=True, help="Pass over faulty sessions, and say how many.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lru", "ttl", "gittins"),
    show_default=True,
    help=f"Eviction, several times for several: {', '.join(eviction_names())}; ttl:30 sets a parameter.",
)
@click.option(
    "--admission",
    "admissions",
    multiple=True,
    default=("none",),
    show_default=True,
    help=f"Which session may start, several times for several: {', '.join(admission_names())}; gate:0.9.",
)
@click.option(
    "--capacity",
    "capacities",
    multiple=True,
    default=("0.5x", "0.75x", "1.0x", "1.25x", "1.5x"),
    show_default=True,
    help="Cache size in tokens, or a multiple of the live contexts (1.0x).",
)
@click.option("--sessions", type=click.IntRange(min=1), default=28, show_default=True, help="Sessions at once.")
@click.option(
    "--think-cap",
    type=click.FloatRange(min=0),
    default=math.inf,
    show_default=True,
    help="Upper bound on recorded think times, in seconds.",
)
@click.option("--orders", type=click.IntRange(min=1), default=3, show_default=True, help="Orders of the sessions.")
@click.option("--page-size", type=click.IntRange(min=1), help="Tokens per page [default: the trace's block size]")
@click.option(
    "--sharing",
    type=click.Choice(["session", "tools+system"]),
    default="session",
    show_default=True,
    help="Whether sessions share the tools + system head of their prompts.",
)
@click.option(
    "--service",
    type=click.Choice([s.name.lower() for s in Service]),
    default="parallel",
    show_default=True,
    help="Time a request takes: as recorded, or by the speeds below.",
)
@click.option("--prefill-speed", type=float, default=Setting.prefill_speed, show_default=True, help="Tokens/s.")
@click.option(
    "--decode-speed", type=float, default=Setting.decode_speed, show_default=True, help="Tokens/s of one request."
)
@click.option("--whole-nodes", is_flag=True, help="Evict whole radix nodes, as SGLang does, not just what is needed.")
@click.option("--no-output", is_flag=True, help="Generated tokens are not inserted into the cache.")
@click.option("--host-capacity", default="", help="Size of a host tier, like --capacity [default: none]")
@click.option("--host-policy", default="lru", show_default=True, help="Eviction of the host tier.")
@click.option("--host-takes-all", is_flag=True, help="Also what nobody is expected to ask for again.")
@click.option("--write-through", is_flag=True, help="The host tier gets all at once, not what the cache evicts.")
@click.option("--no-belady", is_flag=True, help="Leave out Belady's rule, the mark of what is still possible.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Directory for CSV, Parquet and HTML.")
def command(
    path: str,
    trace_format: str | None,
    skip_bad: bool,
    policies: tuple[str, ...],
    admissions: tuple[str, ...],
    capacities: tuple[str, ...],
    sessions: int,
    think_cap: float,
    orders: int,
    page_size: int | None,
    sharing: str,
    service: str,
    prefill_speed: float,
    decode_speed: float,
    whole_nodes: bool,
    no_output: bool,
    host_capacity: str,
    host_policy: str,
    host_takes_all: bool,
    write_through: bool,
    no_belady: bool,
    out: Path | None,
) -> None:
    """Simulate cache policies on the sessions of PATH, without a server.

    PATH is a trace: a file, a directory, an archive, or generated:sessions=20,seed=1.
    """
    chosen = policies if no_belady else tuple(dict.fromkeys((*policies, BELADY)))
    axes = Axes(chosen, capacities, admissions, orders)
    try:
        _check_names(axes, host_policy, host_capacity)
        base = Setting(
            sessions=sessions,
            think_cap=think_cap,
            service=Service[service.upper()],
            prefill_speed=prefill_speed,
            decode_speed=decode_speed,
            truncate=not whole_nodes,
            insert_output=not no_output,
            host_policy=host_policy,
            host_takes_all=host_takes_all,
            write_through=write_through,
        )
        workload = _read(path, trace_format, skip_bad, page_size, sharing == "tools+system")
        result = _run(workload, axes, base, host_capacity)
    except (TraceError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    Console().print(shown(result), highlight=False)
    if out is not None:
        for written in write(result, out):
            click.echo(written)


def _check_names(axes: Axes, host_policy: str, host_capacity: str) -> None:
    """Say what is wrong before minutes of reading."""
    for spec in (*axes.policies, host_policy):
        eviction_policy(spec)
    for spec in axes.admissions:
        admission_policy(spec)
    for text in (*axes.capacities, *([host_capacity] if host_capacity else [])):
        parse_capacity(text, 1e6)


def _read(path: str, trace_format: str | None, skip_bad: bool, page_size: int | None, share_heads: bool) -> Workload:
    stats = ReadStats()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading")

        def counted() -> Iterator[Session]:
            for session in open_trace(path, format=trace_format, skip_bad=skip_bad, stats=stats):
                progress.update(task, description=f"reading: {stats.sessions} sessions")
                yield session

        workload = workload_from_sessions(counted(), page_size=page_size, share_heads=share_heads)
    if stats.skipped_sessions:
        click.echo(f"{stats.skipped_sessions} faulty sessions skipped, the first: {stats.skipped[0]}", err=True)
    return workload


def _run(workload: Workload, axes: Axes, base: Setting, host_capacity: str) -> Result:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling (first use takes a minute)", total=axes.orders + axes.runs)
        started = False

        def show(name: str) -> None:
            nonlocal started
            progress.update(task, description=name, advance=1 if started else 0)
            started = True

        return run_grid(workload, axes, base, host_capacity=host_capacity, progress=show)
