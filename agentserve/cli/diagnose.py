"""``agentserve diagnose``: where the prefixes of a chat log broke, and why. No server is needed."""

from __future__ import annotations

from pathlib import Path

import click
import orjson
from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from eval.diagnose.logs import FORMATS, LogError, files_of, read_log
from eval.diagnose.prompt import Tokenize
from eval.diagnose.run import BrokenTurn, Diagnosis, MissedTurn, Template, diagnose_calls
from eval.diagnose.template import TemplateError, load_served

_MESSAGES_SHOWN = 5


@click.command("diagnose")
@click.argument("logs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="DIR",
              help="Folder of the served checkpoint: places in its tokens, prompts by its chat template.")  # fmt: skip
@click.option("--template-setting", "settings", multiple=True, metavar="NAME=VALUE",
              help="Variable of the chat template, e.g. thinking_mode=enabled.")  # fmt: skip
@click.option("--format", "log_format", type=click.Choice([f.name for f in FORMATS]), help="Kind of log, if unclear.")
@click.option("--examples", type=click.IntRange(min=0), default=3, show_default=True,
              help="Broken turns shown with their texts.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables: every broken turn.")
def command(
    logs: tuple[Path, ...],
    tokenizer: Path | None,
    settings: tuple[str, ...],
    log_format: str | None,
    examples: int,
    as_json: bool,
) -> None:
    """Find where turns of chat logs stop matching their predecessors.

    LOGS: requests of an OpenAI-compatible server as JSONL, Claude Code sessions, Codex sessions; or folders of such
    files. A turn should begin with the prompt and the answer before it; where it does not, the first difference and its
    probable cause are named.
    """
    found = Diagnosis()
    try:
        tokenize, template = _served(tokenizer, settings)
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("reading")
            for log in (file for path in logs for file in files_of(path)):
                diagnose_calls(
                    read_log(log, found.skipped.append, log_format),
                    found,
                    template=template,
                    tokenize=tokenize,
                    progress=lambda: progress.update(task, description=f"{found.calls:,} calls"),
                )
    except (LogError, TemplateError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        click.echo(orjson.dumps(found.as_dict(), option=orjson.OPT_INDENT_2).decode())
    else:
        Console(highlight=False).print(_shown(found, examples))
    for message in found.skipped[:_MESSAGES_SHOWN]:
        click.echo(f"skipped: {message}", err=True)
    if len(found.skipped) > _MESSAGES_SHOWN:
        click.echo(f"skipped: {len(found.skipped) - _MESSAGES_SHOWN:,} more", err=True)
    if not found.calls:
        raise click.ClickException("no call could be read from " + ", ".join(map(str, logs)))


def _served(folder: Path | None, settings: tuple[str, ...]) -> tuple[Tokenize | None, Template | None]:
    if folder is None:
        if settings:
            raise click.UsageError("--template-setting changes a chat template; pass --tokenizer too")
        return None, None
    pairs = [setting.partition("=") for setting in settings]
    if bad := next((name for name, equals, _ in pairs if not equals or not name), None):
        raise click.BadParameter(f"{bad!r} is not NAME=VALUE", param_hint="--template-setting")
    served = load_served(folder, {name: _value(value) for name, _, value in pairs})
    if served.template is None:
        click.echo(f"{folder} has no chat template: messages are compared in a neutral form, in characters", err=True)
    return served.tokenize, served.template


def _value(text: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _shown(found: Diagnosis, examples: int) -> Group:
    parts: list[Table | Text] = [Text(_summary(found))]
    if found.causes:
        table = Table("probable cause", Column("turns", justify="right"), Column("lost", justify="right"), "what to do")
        for cause in found.ranked():
            lost = ", ".join(f"{lost:,} {unit}s" for unit, lost in cause.lost.items())
            note = "" if cause.fault else " (may be on purpose)"
            table.add_row(f"{cause.title}{note}", f"{cause.turns:,}", lost, cause.remedy)
        parts.append(table)
    worst = sorted(found.broken, key=lambda turn: (not turn.found.fault, -turn.found.place.lost))
    parts += [_example(turn) for turn in worst[:examples]]
    if found.missed:
        parts.append(_missed(found.missed))
    return Group(*parts)


def _summary(found: Diagnosis) -> str:
    text = (
        f"{found.calls:,} calls, conversations: {found.conversations:,}; {found.compared:,} continue an earlier call: "
        f"{found.compared - len(found.broken):,} append to it, {len(found.broken):,} do not"
    )
    if found.prompt_tokens:
        counted = f"{found.cached_tokens:,} of {found.prompt_tokens:,} prompt tokens"
        text += f"\nservers counted {counted} as cached: {found.cached_tokens / found.prompt_tokens:.2%}"
    worst = next((cause for cause in found.ranked() if cause.fault), None)
    if worst is not None:
        text += f"\nlargest fault: {worst.title} (turns: {worst.turns:,}); what to do: {worst.remedy}"
    elif found.compared:
        text += "\nno fault in how prompts were built"
    return text


def _example(turn: BrokenTurn) -> Text:
    found, place = turn.found, turn.found.place
    text = Text()
    text.append(f"\n{turn.where}", style="bold")
    text.append(
        f" after {turn.before}: {found.title} ({found.kind})\n"
        f"  {place.unit} {place.at:,} of {place.before:,} differs; {place.lost:,} {place.unit}s cannot be reused\n"
    )
    text.append(f"  both   ...{_one_line(place.shared_text)}\n")
    text.append(f"  before {_one_line(place.old_text) or '(ends)'}\n", style="red")
    text.append(f"  now    {_one_line(place.new_text) or '(ends)'}", style="green")
    return text


def _missed(missed: list[MissedTurn]) -> Table:
    table = Table(
        "text continues, cache missed", Column("turns", justify="right"), Column("tokens", justify="right"),
        "first", "what to do", title="",
    )  # fmt: skip
    for name in dict.fromkeys(turn.found.cause for turn in missed):
        turns = [turn for turn in missed if turn.found.cause == name]
        lost = sum(turn.found.expected - turn.found.cached for turn in turns)
        table.add_row(turns[0].found.title, f"{len(turns):,}", f"{lost:,}", turns[0].where, turns[0].found.remedy)
    return table


def _one_line(text: str) -> str:
    """As people can see it: control characters as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
