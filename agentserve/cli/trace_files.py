"""``agentserve traces check | convert | sample | anonymize``: options and messages; the work is in ``traces``."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from agentserve.cli.trace_input import TraceInput, as_json_option, print_json, reported, with_trace
from traces.anonymize import MIN_KEY_BYTES, Anonymizer
from traces.check import problems
from traces.model import Session, TraceError
from traces.sample import sampled
from traces.writers import Written, write_trace, writer_names

_out = click.argument("out", type=click.Path(path_type=Path))
_to = click.option("--to", type=click.Choice(writer_names()), default="weka-rows", show_default=True,
                   help="Format of OUT. weka-rows and weka hold all that a trace has.")  # fmt: skip


@click.command()
@with_trace
@as_json_option
def check(trace: TraceInput, as_json: bool) -> None:
    """Check every session against its format and the rules of traces; each fault with file, line and field.

    Exits with 1 if there is a fault. Oddities that are accepted are listed, and are no fault.
    """
    trace.skip_bad = True
    broken: list[str] = []

    def read_all() -> None:
        for session in trace.sessions():
            for problem in problems(session):
                source = session.source or trace.path
                error = TraceError(
                    problem.message, file=source, session=session.id, flow=problem.flow, turn=problem.turn
                )
                broken.append(str(error))

    reported(read_all)
    faults = [*trace.stats.skipped, *broken]
    if as_json:
        counts = {"sessions": trace.stats.sessions, "requests": trace.stats.requests}
        print_json({"trace": trace.path, **counts, "faults": faults, "accepted": trace.stats.notes})
    else:
        for word, messages in (("fault", faults), ("accepted", trace.stats.notes)):
            for message in messages:
                click.echo(f"{word}: {message}")
        counted = f"{trace.stats.sessions:,} sessions, {trace.stats.requests:,} requests"
        click.echo(f"{counted} read; {len(faults):,} faults, {len(trace.stats.notes):,} oddities accepted")
    if faults or not trace.stats.sessions:
        raise SystemExit(1)


@click.command()
@with_trace
@_out
@_to
@as_json_option
def convert(trace: TraceInput, out: Path, to: str, as_json: bool) -> None:
    """Write the trace PATH to OUT in another format, and say per field what that format does not hold."""
    written = reported(lambda: write_trace(trace.sessions(), out, to))
    _tell(trace, out, to, written, as_json)


@click.command()
@with_trace
@_out
@click.option("--sessions", "count", type=click.IntRange(min=1), required=True, help="How many sessions to take.")
@click.option("--seed", type=int, default=0, show_default=True, help="Other seed, other sessions.")
@_to
@as_json_option
def sample(trace: TraceInput, out: Path, count: int, seed: int, to: str, as_json: bool) -> None:
    """Write some sessions of PATH, chosen by chance, to OUT.

    The same seed chooses the same sessions, whatever their order or format; a larger sample holds the smaller one.
    PATH is read twice.
    """
    chosen = reported(lambda: sampled((session.id for session in trace.sessions()), count, seed))
    written = reported(lambda: write_trace(_of(trace.sessions(), chosen), out, to))
    _tell(trace, out, to, written, as_json)


def _of(sessions: Iterable[Session], chosen: set[str]) -> Iterable[Session]:
    return (session for session in sessions if session.id in chosen)


@click.command()
@with_trace
@_out
@click.option("--key-file", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help=f"Secret of at least {MIN_KEY_BYTES} bytes, to get the same result again. Default: a new one, "
              "which nobody keeps.")  # fmt: skip
@_to
@as_json_option
def anonymize(trace: TraceInput, out: Path, key_file: Path | None, to: str, as_json: bool) -> None:
    """Write PATH to OUT without names, models and texts, with other block ids and times.

    Which prompts share which prefixes stays, and so does every theoretical hit rate. Lengths, gaps and stop reasons
    stay too: a reader of the result sees them.
    """
    try:
        anonymizer = Anonymizer(secrets.token_bytes(32) if key_file is None else key_file.read_bytes().strip())
    except (ValueError, OSError) as error:
        raise click.ClickException(f"--key-file {key_file}: {error}") from error
    written = reported(lambda: write_trace(map(anonymizer.session, trace.sessions()), out, to))
    _tell(trace, out, to, written, as_json)


def _tell(trace: TraceInput, out: Path, to: str, written: Written, as_json: bool) -> None:
    trace.tell_skipped()
    lost, ignored = dict(written.lost.most_common()), dict(trace.stats.ignored.most_common())
    if as_json:
        counts = {"sessions": written.sessions, "requests": written.requests}
        print_json({"trace": trace.path, "out": str(out), "format": to, **counts, "lost": lost, "ignored": ignored})
        return
    click.echo(f"{out}: {written.sessions:,} sessions, {written.requests:,} requests as {to}")
    if not lost and not ignored:
        click.echo("nothing was lost")
        return
    table = Table("lost", "values", "why")
    for fields, why in ((lost, f"{to} has no place for it"), (ignored, "agentserve does not read it")):
        for field, count in fields.items():
            table.add_row(field, f"{count:,}", why)
    Console().print(table)


COMMANDS = (check, convert, sample, anonymize)
