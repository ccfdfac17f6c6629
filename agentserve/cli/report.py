"""``agentserve report``: realized against theoretical hit rate of a recorded run."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "json_out", metavar="PATH", help="JSON file [default: RUN/report.json]; - prints only JSON.")
@click.option("--html", "html_out", metavar="PATH", help="HTML file [default: RUN/report.html].")
@click.option("--no-html", is_flag=True, help="Write no HTML page.")
@click.option("--page", type=click.IntRange(min=1), help="Page size for the theory [default: the server's].")
@click.option("--slo-ttft", type=click.FloatRange(min=0), metavar="SECONDS", help="Goodput: largest TTFT.")
@click.option("--slo-tpot", type=click.FloatRange(min=0), metavar="SECONDS", help="Goodput: largest TPOT.")
def command(
    run: Path,
    json_out: str | None,
    html_out: str | None,
    no_html: bool,
    page: int | None,
    slo_ttft: float | None,
    slo_tpot: float | None,
) -> None:
    """Report the realized against the theoretical hit rate of RUN, a directory of `agentserve replay`.

    Prints tables, and writes RUN/report.json and RUN/report.html.
    """
    from rich.console import Console

    from agentserve.audit.recorded import audit_of_run
    from eval.report import ReportError, Slo, load_run, render_terminal, summarize

    if no_html and html_out is not None:
        raise click.UsageError("--html and --no-html exclude each other")
    try:
        loaded = load_run(run)
        report = summarize(
            loaded.header,
            loaded.records,
            loaded.events,
            page_size=page,
            slo=Slo(slo_ttft, slo_tpot),
            notes=loaded.notes,
            kv_events=loaded.kv_events,
            audit=audit_of_run(loaded.header.server.args, loaded.metrics),
        )
    except ReportError as error:
        raise click.ClickException(str(error)) from None

    text = report.model_dump_json(indent=2) + "\n"
    to_stdout = json_out == "-"
    if to_stdout:
        sys.stdout.write(text)
    else:
        render_terminal(report, Console())
        _write(run / "report.json" if json_out is None else Path(json_out), text, "--json PATH")
    if not no_html:
        from eval.report.html import render_html

        page_file = run / "report.html" if html_out is None else Path(html_out)
        _write(page_file, render_html(report, loaded.records), "--html PATH or --no-html")
        click.echo(f"HTML: {page_file}", err=to_stdout)


def _write(file: Path, text: str, instead: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{file}: cannot be written ({error.strerror}); use {instead}") from None
