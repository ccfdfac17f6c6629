"""``agentserve demo``: launch the tiny M3, replay a trace against it and show the report."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from agentserve.checkpoint.folder import CheckpointFolderError
from agentserve.cli.launch import launch_arguments
from agentserve.launch.demo import CAPACITY, GENERATED_TRACE, demo_overrides, free_run_directory, replay_arguments
from agentserve.launch.host import free_ports
from agentserve.launch.plan import PlanError, make_plan
from agentserve.launch.preflight import preflight
from agentserve.launch.process import ServerError, ServerProcess
from agentserve.launch.recipe import RecipeError, find_recipe, load_recipe
from agentserve.launch.show import print_findings, starting
from traces.model import TraceError
from traces.readers.base import resolve_format


@click.command()
@click.option("--sessions", type=click.IntRange(min=1), default=8, show_default=True, help="Sessions to replay.")
@click.option(
    "--trace", type=click.Path(exists=True, path_type=Path), help="Recorded trace in place of a generated one."
)
@click.option("--out", type=click.Path(path_type=Path), default="runs/demo", show_default=True, help="Run directory.")
@click.option("--checkpoint", type=click.Path(path_type=Path), default=".cache/tiny-m3", show_default=True,
              help="Tiny M3; written if it is not there.")  # fmt: skip
@click.option("--capacity", type=click.IntRange(min=1), help="Tokens of KV cache.  "
              f"[default: {CAPACITY}, too few for all; the recipe's for a recorded trace]")  # fmt: skip
@click.option("--policy", help="Eviction policy of ours, e.g. gittins, in place of SGLang's lru.")
@click.option("--admission", help="Which sessions may start, e.g. gate:0.9; needs --policy.")
def command(
    sessions: int,
    trace: Path | None,
    out: Path,
    checkpoint: Path,
    capacity: int | None,
    policy: str | None,
    admission: str | None,
) -> None:
    """Launch a tiny random MiniMax-M3 on this CPU, replay coding sessions and report the hit rate.

    The three steps are the commands `launch`, `replay` and `report`; they are shown as they run. The server has less
    memory than the sessions want, and the report says what that cost.
    """
    from agentserve.cli.replay import command as replay
    from agentserve.cli.report import command as report

    began = time.monotonic()
    console = Console(stderr=True, highlight=False)
    try:
        resolve_format(str(trace) if trace is not None else GENERATED_TRACE)
    except TraceError as error:  # before a minute of waiting for the server
        raise click.ClickException(f"--trace: {error}") from None
    if not (checkpoint / "config.json").is_file():
        from agentserve.checkpoint.tiny import write_tiny_checkpoint

        try:
            write_tiny_checkpoint(checkpoint, overwrite=True)
        except CheckpointFolderError as error:
            raise click.ClickException(f"--checkpoint: {error}") from None
        console.print(escape(f"wrote a tiny random MiniMax-M3 to {checkpoint}"))
    out = free_run_directory(out)
    if capacity is None and trace is None:
        capacity = CAPACITY
    port = free_ports(2)
    overrides = demo_overrides(checkpoint, port, port + 1, capacity, policy, admission)
    try:
        recipe = load_recipe(find_recipe("tiny-cpu"), overrides)
        checked = preflight(recipe)
        print_findings(console, checked)
        if not checked.ok:
            sys.exit(2)
        plan = make_plan(recipe, checked.facts, model=recipe.model, cwd=Path.cwd())
    except (RecipeError, PlanError) as error:
        console.print(escape(str(error)), soft_wrap=True)
        sys.exit(2)
    compiling = _compile_simulator()
    try:
        with ServerProcess(plan, out.with_name(f"{out.name}-server.log")) as server:
            _announce(console, ["launch", *launch_arguments("tiny-cpu", overrides)])
            with starting(console, server.log) as progress:
                seconds = server.wait_ready(600.0, progress)
            console.print(f"ready after {seconds:.0f} s: {plan.url}")
            arguments = replay_arguments(trace, sessions, out, plan.url)
            _announce(console, ["replay", *arguments])
            code = replay.main(arguments, standalone_mode=False)
            server.catch_signals()  # the replay had its own
        compiling.wait()
    except ServerError as error:
        console.print(escape(str(error)), soft_wrap=True)
        sys.exit(1)
    finally:
        compiling.terminate()
    _announce(console, ["report", str(out)])
    report.main([str(out)], standalone_mode=False)
    if policy is None and trace is None:
        again = ["--sessions", str(sessions), "--capacity", str(capacity), "--checkpoint", str(checkpoint)]
        again += ["--policy", "gittins", "--out", str(out)]
        console.print("Next, the same under another policy, and both side by side:")
        for arguments in (["demo", *again], ["compare", str(out), str(free_run_directory(out))]):
            console.print(f"  agentserve {escape(shlex.join(arguments))}", soft_wrap=True)
    console.print(f"demo took {time.monotonic() - began:.0f} s; the server is stopped")
    sys.exit(code or 0)


def _compile_simulator() -> subprocess.Popen[bytes]:
    """Begin to compile what the report simulates with, a minute on first use, while the server starts.

    If it fails, the report compiles for itself.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "eval.report.what_if"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def _announce(console: Console, arguments: list[str]) -> None:
    console.print(f"[bold]$ agentserve {escape(shlex.join(arguments))}[/]", soft_wrap=True)
