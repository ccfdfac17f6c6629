"""``agentserve compare``: runs side by side, and paired per request with confidence intervals."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_out", metavar="PATH", help="Also write JSON to this file; - prints only JSON.")
@click.option("--md", "md_out", metavar="PATH", help="Also write Markdown to this file; - prints only Markdown.")
@click.option("--anyway", is_flag=True, help="Compare runs that would be refused; the reasons stay in the result.")
def command(runs: tuple[Path, ...], json_out: str | None, md_out: str | None, anyway: bool) -> None:
    """Compare two RUNs or more, directories of `agentserve replay`; the first is what the others are compared with.

    Runs of other data, prompts, protocols or acceptance modes are refused; other differences are shown.
    """
    if json_out == md_out == "-":
        raise click.UsageError("--json - and --md - both print: give one of them a file")
    if len({run.resolve() for run in runs}) < len(runs):
        raise click.UsageError("a RUN is given twice: it has no difference to itself; replay again for a second run")
    from rich.console import Console

    from eval.compare import CompareError, compare, render_comparison, render_comparison_markdown
    from eval.report import ReportError, load_run

    try:
        result = compare([load_run(run) for run in runs], _names(runs), allow=anyway)
    except (CompareError, ReportError) as error:
        raise click.ClickException(str(error)) from None
    written = {"--json": (json_out, result.model_dump_json(indent=2) + "\n"),
               "--md": (md_out, render_comparison_markdown(result))}  # fmt: skip
    for option, (place, text) in written.items():
        if place is not None and place != "-":
            _write(Path(place), text, option)
    printed = [text for place, text in written.values() if place == "-"]
    if printed:
        sys.stdout.write(printed[0])
    else:
        render_comparison(result, Console())


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{option} {file}: cannot be written ({error.strerror})") from None


def _names(runs: tuple[Path, ...]) -> list[str]:
    """Names of the directories; whole paths where two are called the same."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(short) else [str(run) for run in runs]
