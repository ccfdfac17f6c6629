"""The command line. One module a command, imported only when that command runs."""

from __future__ import annotations

import difflib
import importlib

import click

# name -> (module that defines `command`, one line of help)
_COMMANDS = {
    "launch": ("agentserve.cli.launch", "Start the server from a recipe and wait until it is healthy."),
    "replay": ("agentserve.cli.replay", "Replay a multi-turn trace against a running server."),
    "report": ("agentserve.cli.report", "Report realized against theoretical hit rate of a run."),
    "compare": ("agentserve.cli.compare", "Compare runs side by side, and paired per request."),
    "diagnose": ("agentserve.cli.diagnose", "Find where turns of a chat log broke their prefix, and why."),
    "traces": ("agentserve.cli.traces", "Traces: theoretical hit rate, statistics, check, convert, sample, anonymize."),
    "audit": ("agentserve.cli.audit", "Which fast paths of a running server really ran."),
    "watch": ("agentserve.cli.watch", "Watch a running server: hit rate, causes, sessions, tiers."),
    "shapes": ("agentserve.cli.shapes", "Local GEMM shapes and bytes of one tensor-parallel rank."),
    "checkpoint": ("agentserve.cli.checkpoint", "Write small random checkpoints."),
    "simulate": ("agentserve.cli.simulate", "Simulate eviction and admission on a trace, without a server."),
    "demo": ("agentserve.cli.demo", "Launch the tiny M3, replay a trace and show the report."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"There are {', '.join(_COMMANDS)}."
            raise click.UsageError(f"{error.message} {hint}", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Help must not import every command (and with it SGLang, plotly, numba).
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="agentserve")
def main() -> None:
    """Serve coding agents with MiniMax-M3 on SGLang, and explain the prefix-cache hit rate."""
