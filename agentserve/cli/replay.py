"""``agentserve replay``: options, progress display and exit codes; the work is in ``traces.replay``."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from pydantic import ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from traces.replay.config import ReplayConfig
from traces.replay.run import ReplayError, RunResult, replay, resumed_config
from traces.replay.tally import Tally

EXIT_SERVER_LOST, EXIT_INTERRUPTED = 3, 130

_COUNT = click.IntRange(min=1)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.argument("trace", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the run; new or empty.")
@click.option("--resume", type=click.Path(path_type=Path), help="Go on with this run; its settings apply.")
@click.option("--url", default=None, help="Address of the server.  [default: http://127.0.0.1:30000]")
@click.option("--client", type=click.Choice(["sglang", "openai"]), default="sglang",
              help="sglang: token-exact, /generate. openai: text, chat completions.")  # fmt: skip
@click.option("--model", help="Served model name (openai).")
@click.option("--api-key", envvar="AGENTSERVE_API_KEY", help="Bearer token (AGENTSERVE_API_KEY). Never stored.")
@click.option("--format", "trace_format", help="Trace format, where it cannot be told from the file.")
@click.option("--skip-bad", is_flag=True, help="Skip faulty sessions instead of stopping at the first.")
@click.option("--sessions", type=_COUNT, help="Replay this many sessions of the trace.")
@click.option("--concurrency", type=_COUNT, default=4, help="Sessions active at once.")
@click.option("--in-flight", type=_COUNT, help="Requests open at once; the others wait.  [default: one a flow]")
@click.option("--think", metavar="FORM", default="recorded",
              help="Waits between turns: recorded, none, scaled:FACTOR, capped:SECONDS, or both as in "
              "scaled:0.1,capped:6 (a tenth of what was recorded, 6 s at most).")  # fmt: skip
@click.option("--history", type=click.Choice(["recorded", "own"]), default="recorded",
              help="Send the recorded continuation as history, or the server's own output.")  # fmt: skip
@click.option("--sharing", type=click.Choice(["session", "tools+system"]), default="session",
              help="Whether sessions share the tokens of tools and system prompt.")  # fmt: skip
@click.option("--tokens-per-block", type=_COUNT, help="Reduce the trace's blocks to this many tokens.")
@click.option("--max-turns", type=_COUNT, help="Turns of each flow.")
@click.option("--max-output", type=_COUNT, help="Tokens of each answer.")
@click.option("--max-context", type=_COUNT, help="Prompt plus output.  [default: what the server takes]")
@click.option("--over-limit", type=click.Choice(["end-flow", "drop-turn", "fail"]), default="end-flow",
              help="What a turn over the context limit does.")  # fmt: skip
@click.option("--limit-requests", type=_COUNT, help="Replay this many requests in all.")
@click.option("--seed", type=int, default=0, help="Seeds tokens and --shuffle.")
@click.option("--shuffle", is_flag=True, help="Take sessions in an order drawn from the seed.")
@click.option("--vocab", metavar="LO:HI", help="Token ids to use.  [default: from the checkpoint]")
@click.option("--flush-cache/--no-flush-cache", default=None,
              help="Empty the server's cache first.  [default: flush for sglang]")  # fmt: skip
@click.option("--ignore-eos/--no-ignore-eos", default=True, help="Ask for full output lengths (openai).")
@click.option("--events", metavar="auto|none|ADDRESS", default="auto",
              help="Record cache events: where the server publishes them, never, or from tcp://HOST:PORT.")  # fmt: skip
@click.option("--metrics-every", "metrics_every_s", type=click.FloatRange(0), default=2.0, show_default=True,
              help="Seconds between samples of the server's counters; 0: none.")  # fmt: skip
@click.option("--request-timeout", "request_timeout_s", type=click.FloatRange(0, min_open=True), default=600.0,
              help="Longest silence of an open request, in seconds.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress display.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    trace: str | None,
    out: Path | None,
    resume: Path | None,
    url: str | None,
    vocab: str | None,
    api_key: str | None,
    quiet: bool,
    **settings: Any,
) -> None:
    """Replay TRACE against a running server, as a closed loop, and record every request.

    TRACE is a file, directory or archive, or generated:sessions=N,seed=S.

    Exit codes: 0 finished, 1 or 2 an error in what was asked for, 3 the server was lost, 130 interrupted. A run
    that was lost or interrupted can be reported and resumed.
    """
    try:
        if resume is not None:
            _refuse_settings(ctx)
            config = resumed_config(resume, url=url)
        elif trace is None or out is None:
            raise click.UsageError("give a TRACE and --out RUN, or --resume RUN")
        else:
            given = settings | {"trace": trace, "out": out, "vocab": _range(vocab)}
            config = ReplayConfig.model_validate(given | ({} if url is None else {"url": url}))
        with _display(quiet) as show:
            result = replay(config, resume=resume is not None, api_key=api_key, on_progress=show)
    except ValidationError as error:
        raise click.UsageError(_fault(error)) from error
    except ReplayError as error:
        raise click.ClickException(str(error)) from error
    click.echo(_summary(result))
    ctx.exit({"finished": 0, "server_lost": EXIT_SERVER_LOST, "interrupted": EXIT_INTERRUPTED}[result.status])


@contextmanager
def _display(quiet: bool) -> Iterator[Callable[[Tally], None]]:
    """A progress bar on standard error; yields the callback that moves it."""
    columns = (TextColumn("[bold]replay"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    state_column = TextColumn("{task.fields[state]}")
    with Progress(*columns, state_column, console=Console(stderr=True), disable=quiet, refresh_per_second=4) as bar:
        task = bar.add_task("replay", total=None, state="reading the trace")

        def update(tally: Tally) -> None:
            state = (
                f"sessions {tally.sessions_done}/{tally.sessions_total} ({tally.sessions_running} active), "
                f"{tally.in_flight} in flight, hit {tally.realized.rate:.1%}, errors {tally.failed}"
            )
            bar.update(task, total=tally.requests_total, completed=tally.requests, state=state)

        yield update


def _summary(result: RunResult) -> str:
    tally = result.tally
    lines = [
        f"{tally.requests} of {tally.requests_total} requests of {tally.sessions_total} sessions recorded in "
        f"{result.wall_s:.1f} s; {_errors(tally)}; {result.dropped_turns} turns over the context limit dropped."
    ]
    if tally.realized.requests:
        lines[0] += (
            f" Hit rate realized {tally.realized.rate:.2%}, theoretical at page size {tally.page_size} "
            f"{tally.theoretical.rate:.2%} (hit tokens / prompt tokens, {tally.realized.requests} requests)."
        )
    run = shlex.quote(str(result.path))
    report, resume = f"agentserve report {run}", f"agentserve replay --resume {run}"
    if result.status == "finished":
        lines.append(f"Next: {report}")
    elif result.status == "interrupted":
        lines.append(f"Interrupted: {result.interrupted_requests} requests in flight aborted; the run is in {run}.")
        lines.append(f"Next: {resume}    (or {report})")
    else:
        lines.append(f"The server was lost; the run is in {run}. Start the server again to go on.")
        lines.append(f"Next: {resume}    (--url if it has moved; or {report})")
    return "\n".join(lines)


def _errors(tally: Tally) -> str:
    if not tally.failed:
        return "no errors"
    kinds = ", ".join(f"{kind} {count}" for kind, count in tally.errors.most_common())
    return f"{tally.failed} failed ({kinds})"


def _fault(error: ValidationError) -> str:
    """The first setting that is wrong, by its option's name."""
    fault = error.errors(include_url=False)[0]
    message = fault["msg"].removeprefix("Value error, ")
    return f"--{str(fault['loc'][0]).replace('_', '-')}: {message}" if fault["loc"] else message


def _range(vocab: str | None) -> tuple[int, int] | None:
    if vocab is None:
        return None
    low, _, high = vocab.partition(":")
    if not (low.isdigit() and high.isdigit()):
        raise click.UsageError(f"--vocab is LO:HI, such as 1000:100000, not {vocab!r}")
    return int(low), int(high)


def _refuse_settings(ctx: click.Context) -> None:
    """A resumed run keeps its settings: another one beside it would be ignored without a word."""
    allowed = {"resume", "url", "api_key", "quiet"}
    given = [
        parameter.opts[0] if isinstance(parameter, click.Option) else parameter.human_readable_name
        for parameter in ctx.command.params
        if parameter.name is not None
        and parameter.name not in allowed
        and ctx.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(f"--resume takes its settings from the run: leave out {', '.join(given)}")
