"""``agentserve launch``: start the server from a recipe and wait until it is healthy."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from agentserve.launch.daemon import offload_daemons
from agentserve.launch.plan import PlanError, make_plan
from agentserve.launch.preflight import preflight
from agentserve.launch.process import ServerError, ServerProcess
from agentserve.launch.recipe import (
    Override,
    RecipeError,
    find_recipe,
    load_recipe,
    parse_set,
)
from agentserve.launch.show import print_findings, print_plan, print_ready, starting

_FIELD_OF_OPTION = {
    "model": "model",
    "host": "host",
    "port": "port",
    "tp": "tp",
    "context_length": "context_length",
    "kv_tokens": "kv.capacity_tokens",
    "page_size": "page_size",
    "kv_events": "kv_events",
    "policy": "radix.policy",
    "admission": "radix.admission",
    "offload": "offload.backend",
    "offload_l2": "offload.l2",
    "index_reuse": "index_reuse",
    "eagle3": "eagle3.draft",
    "eagle3_steps": "eagle3.steps",
    "synthetic_acceptance": "eagle3.synthetic_length",
}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def launch_arguments(recipe: str, overrides: Sequence[Override]) -> list[str]:
    """Arguments with which this command serves ``recipe`` with these fields changed; each has an option of its own."""
    options = {field: _option(name) for name, field in _FIELD_OF_OPTION.items()}
    return [recipe, *(word for o in overrides for word in (options[o.field], str(o.value)))]


@click.command()
@click.argument("recipe_name", metavar="RECIPE")
@click.option("--model", help="Checkpoint folder, or a Hub id that is in the local cache.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--tp", type=int, help="Tensor-parallel ranks.")
@click.option("--context-length", type=int, help="Longest request, in tokens.")
@click.option("--kv-tokens", type=int, help="Capacity of the KV cache, in tokens.")
@click.option("--page-size", type=int, help="Tokens per page; M3 needs its sparse block size.")
@click.option("--kv-events", metavar="tcp://*:PORT", help="Publish cache events, which replays record.")
@click.option("--policy", help="Eviction policy of ours, e.g. gittins or ttl:handicap=30, in place of SGLang's.")
@click.option("--admission", help="Which sessions may start, e.g. gate:0.9; needs --policy.")
@click.option("--index-reuse", help="Sparse layers share block selections: freq:4 or layers:3,7,11.")
@click.option("--eagle3", metavar="DRAFT", help="EAGLE3 draft: checkpoint folder, or a cached Hub id.")
@click.option("--eagle3-steps", type=int, help="Drafts per verification.")
@click.option(
    "--synthetic-acceptance",
    metavar="LENGTH",
    help="Tokens per verification as if the draft were that good, or golden: as measured. For speed only.",
)
@click.option("--offload", type=click.Choice(["lmcache"]), help="Keep evicted prefixes in host memory, by LMCache.")
@click.option("--offload-l2", metavar="URL", help="Behind that memory, as redis://host:port; needs --offload.")
@click.option("--set", "sets", multiple=True, metavar="FIELD=VALUE", help="Any field, e.g. kv.dtype=bfloat16.")
@click.option("--dry-run", is_flag=True, help="Print the command that would run, and start nothing.")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the server's output.  [default: runs/launch/RECIPE-TIME.log]",
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=1800.0, show_default=True,
    help="Seconds to wait until it is healthy.",
)  # fmt: skip
def command(
    recipe_name: str, sets: tuple[str, ...], dry_run: bool, log: Path | None, timeout: float, **flags: Any
) -> None:
    """Start the server that RECIPE describes and wait until it is healthy; run until Ctrl-C.

    RECIPE is a YAML file or a shipped recipe: tiny-cpu, m3-h200, m3-mi355x. An option takes the place of the
    recipe's field; --dry-run shows the outcome.

    Exit codes: 2 it cannot be started, 130 stopped before it was ready, else the server's own when it ends by itself.
    """
    console, errors = Console(highlight=False), Console(stderr=True, highlight=False)
    overrides = [
        Override(_FIELD_OF_OPTION[name], value, _option(name)) for name, value in flags.items() if value is not None
    ]
    try:
        path = find_recipe(recipe_name)
        recipe = load_recipe(path, [*(parse_set(text) for text in sets), *overrides])
        checked = preflight(recipe)
        # Before the plan: it may fail for the very reason that a finding explains.
        print_findings(errors, checked)
        model = str(checked.facts.path) if checked.facts else recipe.model
        plan = make_plan(recipe, checked.facts, model=model, cwd=Path.cwd(), draft=checked.draft)
    except RecipeError as error:
        errors.print(escape(str(error)), soft_wrap=True)
        sys.exit(2)
    except PlanError as error:
        if checked.ok:  # else it says again, less clearly, what a finding said
            errors.print(escape(str(error)), soft_wrap=True)
        sys.exit(2)
    if dry_run:
        print_plan(console, plan, recipe, checked.facts, checked.draft)
        return
    if not checked.ok:
        sys.exit(2)

    log = log or Path("runs") / "launch" / f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}.log"
    try:
        with (
            offload_daemons(recipe, log.with_name(f"{log.stem}-lmcache.log"), report=_told(errors)),
            ServerProcess(plan, log) as server,
        ):
            with starting(errors, log) as progress:
                seconds = server.wait_ready(timeout, progress)
            print_ready(console, plan, recipe, log, seconds)
            try:
                exit_code = server.wait()
            except KeyboardInterrupt:
                errors.print("stopping the server (Ctrl-C again to kill it)")
                return
            errors.print(f"the server ended by itself with exit code {exit_code}; its last lines:", soft_wrap=True)
            errors.print(escape(server.log_tail()), soft_wrap=True)
    except ServerError as error:
        errors.print(escape(str(error)), soft_wrap=True)
        sys.exit(_shell_code(error.exit_code))
    except KeyboardInterrupt:
        errors.print("stopped before it was ready")
        sys.exit(130)
    sys.exit(_shell_code(exit_code))


def _told(console: Console) -> Callable[[str], None]:
    return lambda what: console.print(escape(what), soft_wrap=True)


def _shell_code(exit_code: int | None) -> int:
    """An exit code as a shell writes it; an end that nobody asked for is never 0."""
    if exit_code is None or exit_code == 0:
        return 1
    return 128 - exit_code if exit_code < 0 else exit_code
