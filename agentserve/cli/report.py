"""``agentserve report``: realized against theoretical hit rate of a recorded run, why, and what would change it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from eval.report import Report, Run
    from eval.report.schema_what_if import WhatIf

_GB = 10**9


@contextmanager
def _without_collector() -> Iterator[None]:
    """What a report reads it keeps: looking for garbage among millions of objects takes time and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _print_schema(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        import json

        from eval.report import Report

        click.echo(json.dumps(Report.model_json_schema(), indent=2, sort_keys=True))
        context.exit()


@click.command("report")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_out", metavar="PATH", help="JSON file [default: RUN/report.json]; - prints only JSON.")
@click.option("--html", "html_out", metavar="PATH", help="HTML file [default: RUN/report.html].")
@click.option("--no-html", is_flag=True, help="Write no HTML page.")
@click.option("--md", "md_out", metavar="PATH", help="Markdown file [default: RUN/report.md; none with --json -].")
@click.option("--no-md", is_flag=True, help="Write no Markdown.")
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of report.json, and nothing else.")  # fmt: skip
@click.option("--page", type=click.IntRange(min=1), help="Page size for the theory [default: the server's].")
@click.option("--slo-ttft", type=click.FloatRange(min=0), metavar="SECONDS", help="Goodput: largest TTFT.")
@click.option("--slo-tpot", type=click.FloatRange(min=0), metavar="SECONDS", help="Goodput: largest TPOT.")
@click.option("--what-if", "what_if_s", type=click.FloatRange(min=0), metavar="SECONDS", default=10.0,
              show_default=True, help="Computing time to simulate other caches on this run; 0: none.")  # fmt: skip
@click.option("--more-gb", multiple=True, type=click.FloatRange(min=0, min_open=True), metavar="GB",
              help="Also ask what so much more cache would bring; several times for several.")  # fmt: skip
@click.option("--bytes-per-token", type=click.FloatRange(min=0, min_open=True), metavar="BYTES",
              help="Of the cache, over all ranks [default: what the server's pools show].")  # fmt: skip
@_without_collector()
def command(
    run: Path,
    json_out: str | None,
    html_out: str | None,
    no_html: bool,
    md_out: str | None,
    no_md: bool,
    page: int | None,
    slo_ttft: float | None,
    slo_tpot: float | None,
    what_if_s: float,
    more_gb: tuple[float, ...],
    bytes_per_token: float | None,
) -> None:
    """Report the realized against the theoretical hit rate of RUN, a directory of `agentserve replay`.

    Prints tables, and writes RUN/report.json, RUN/report.md and RUN/report.html.
    """
    from rich.console import Console

    from agentserve.audit.recorded import audit_of_run
    from eval.report import ReportError, Slo, load_run, render_terminal, summarize
    from eval.report.markdown import render_markdown
    from traces.replay.metrics import MetricsError, read_metrics

    for name, path, off in (("html", html_out, no_html), ("md", md_out, no_md)):
        if off and path is not None:
            raise click.UsageError(f"--{name} and --no-{name} exclude each other")
    try:
        loaded = load_run(run)
        samples = read_metrics(run)
        report = summarize(
            loaded.header,
            loaded.records,
            loaded.events,
            page_size=page,
            slo=Slo(slo_ttft, slo_tpot),
            notes=loaded.notes,
            kv_events=loaded.kv_events,
            audit=audit_of_run(loaded.header.server.args, loaded.metrics),
            texts=loaded.texts,
        )
    except (ReportError, MetricsError) as error:
        raise click.ClickException(str(error)) from None
    if what_if_s > 0:
        found = _what_if(loaded, report, what_if_s, more_gb, bytes_per_token)
        report = report.model_copy(update={"what_if": found})

    text = report.model_dump_json(indent=2) + "\n"
    to_stdout = json_out == "-"
    if to_stdout:
        sys.stdout.write(text)
    else:
        render_terminal(report, Console())
        _write(run / "report.json" if json_out is None else Path(json_out), text, "--json PATH")
    # Where all goes elsewhere, nothing is written into the run beside what is asked for.
    if md_out is not None or not (no_md or to_stdout):
        markdown_file = run / "report.md" if md_out is None else Path(md_out)
        _write(markdown_file, render_markdown(report), "--md PATH or --no-md")
        click.echo(f"Markdown: {markdown_file}", err=to_stdout)
    if not no_html:
        from eval.report.html import render_html

        page_file = run / "report.html" if html_out is None else Path(html_out)
        _write(page_file, render_html(report, loaded.records, loaded.kv_events, samples), "--html PATH or --no-html")
        click.echo(f"HTML: {page_file}", err=to_stdout)


def _what_if(
    loaded: Run, report: Report, seconds: float, more_gb: Sequence[float], bytes_per_token: float | None
) -> WhatIf | None:
    """Simulate other caches, with a progress bar where somebody looks."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from agentserve.cli.report_facts import serving_of_run
    from eval.report.what_if import what_if

    header = loaded.header
    serving = serving_of_run(header.server.args, loaded.metrics, bytes_per_token=bytes_per_token)
    if more_gb and serving.bytes_per_token is None:
        raise click.UsageError(
            "--more-gb needs the bytes of a token, and this run's server did not tell them: pass --bytes-per-token, as"
            " `agentserve shapes RECIPE` shows it for one rank, times the ranks"
        )
    realized = report.rate("realized")
    columns = (TextColumn("what if: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading", total=None)

        def show(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total or None)

        return what_if(
            header,
            loaded.records,
            loaded.kv_events,
            page_size=report.page_size.tokens,
            realized_rate=None if realized is None else realized.rate,
            serving=serving,
            seconds=seconds,
            more_tokens=[round(gb * _GB / (serving.bytes_per_token or 1.0)) for gb in more_gb],
            progress=show,
        )


def _write(file: Path, text: str, instead: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{file}: cannot be written ({error.strerror}); use {instead}") from None
