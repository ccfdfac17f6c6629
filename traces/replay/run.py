"""One replay from start to end: look at the server, choose what to send, run the engine, close the books."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from traces import open_trace
from traces.model import ReadStats, Session, TraceError
from traces.readers.base import resolve_format
from traces.replay.clients.base import Client, ServerUnreachableError
from traces.replay.clients.openai import OpenAIClient
from traces.replay.clients.sglang import SGLangClient, usable_context
from traces.replay.config import ReplayConfig
from traces.replay.engine import Engine, Rules, Status, ignore_record
from traces.replay.events import EventError
from traces.replay.events_zmq import EventRecorder, recorder_for
from traces.replay.given import PROMPTS, GivenPrompts, write_prompts
from traces.replay.metrics import METRICS, sampled
from traces.replay.record import RunEvent, RunHeader, ServerInfo
from traces.replay.select import Limits, Selection, select
from traces.replay.signals import Signals
from traces.replay.store import (
    METRICS_END,
    METRICS_START,
    Progress,
    Run,
    RunError,
    RunWriter,
    read_run,
    reopen,
)
from traces.replay.tally import Tally


class ReplayError(RuntimeError):
    """A replay that could not start. The message says what to do."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a replay ended.

    Attributes:
        tally: sums over all requests of the run, those from before a resume included.
        dropped_turns: turns that the context limit left out.
        interrupted_requests: requests in flight at Ctrl-C; they have no record and are sent again on resume.
        wall_s: seconds this process replayed.
    """

    path: Path
    status: Status
    tally: Tally
    dropped_turns: int
    interrupted_requests: int
    wall_s: float


def replay(
    config: ReplayConfig,
    *,
    resume: bool = False,
    given: GivenPrompts | None = None,
    api_key: str | None = None,
    on_progress: Callable[[Tally], None] = lambda tally: None,
    handle_signals: bool = True,
) -> RunResult:
    """Replay a trace against a running server and write ``config.out``.

    Args:
        resume: go on with the run in ``config.out`` (take ``config`` from ``resumed_config``).
        given: prompts as they are, in place of those made from the block ids of ``config.trace``, which is then only a
            name. Such a run cannot be resumed.
        api_key: bearer token for the server; not written anywhere.
        on_progress: called after each record and whenever a session starts or ends.
        handle_signals: first SIGINT or SIGTERM stops cleanly, the second exits at once; main thread only.

    Raises:
        ReplayError: no server, unknown trace, nothing to send, or a run that does not match.
    """
    try:
        return asyncio.run(_replay(config, resume, given, api_key, on_progress, handle_signals))
    except (ServerUnreachableError, RunError, TraceError, EventError) as error:
        raise ReplayError(str(error)) from error


def resumed_config(path: Path, *, url: str | None = None) -> ReplayConfig:
    """The settings of the run in ``path``; ``url`` where the server has moved.

    Raises:
        ReplayError: no run there, or one without settings.
    """
    try:
        header = read_run(path).header
    except RunError as error:
        raise ReplayError(f"nothing to resume: {error}") from error
    if not header.config:
        raise ReplayError(f"{path}/run.json: field 'config' is missing; this run cannot be resumed")
    change: dict[str, object] = {"out": path}
    if url is not None:
        change["url"] = url
    return ReplayConfig.model_validate(header.config | change)


def replayed_sessions(run: Run) -> list[Session]:
    """The sessions of a run as they were sent, read again from its trace; its own limits apply.

    Raises:
        ReplayError: the run has no settings, or its trace is gone or has changed.
    """
    config = resumed_config(run.path)
    selection = _select(config, run.header.filter.get("max_context"))
    _check_same(run.header, selection, config)
    return selection.sessions


async def _replay(
    config: ReplayConfig,
    resume: bool,
    given: GivenPrompts | None,
    api_key: str | None,
    on_progress: Callable[[Tally], None],
    handle_signals: bool,
) -> RunResult:
    client = _client(config, api_key)
    recorder: EventRecorder | None = None
    try:
        header = read_run(config.out).header if resume else None
        if header is None:
            RunWriter.check_free(config.out)
        server = await client.info()
        vocab = (header and header.vocab) or config.vocab or await client.vocabulary()
        if vocab is None:
            raise ReplayError(
                f"{config.url} does not tell its vocabulary and its checkpoint ({server.model}) is not readable here; "
                "give a range of ordinary token ids, such as --vocab 1000:100000"
            )
        # Reading a large trace takes a while; whatever else can fail was tried before.
        limit = context_limit(config, server) if header is None else _same_limit(header, config, server)
        selection = _select(config, limit, given)
        before = None
        recorder, emptied = recorder_for(config.events, server), False
        if header is not None:
            _check_same(header, selection, config)
            writer, before = reopen(config.out)
        else:
            # A resumed run leaves the cache alone: what the run has sent is meant to be in it.
            if config.client == "sglang" if config.flush_cache is None else config.flush_cache:
                await client.flush_cache()
                emptied = recorder is not None and await recorder.sees_flush(client.flush_cache)
            made = _header(config, server, selection, vocab, limit, given is not None)
            writer = RunWriter.create(config.out, made)
            if given is not None:
                write_prompts(config.out, given.tokens)
        try:
            return await _run(
                config, client, writer, selection, server, vocab, before, on_progress, handle_signals, recorder,
                emptied, given,
            )  # fmt: skip
        finally:
            writer.close()
    finally:
        if recorder is not None:
            recorder.close()
        await client.aclose()


async def _run(
    config: ReplayConfig,
    client: Client,
    writer: RunWriter,
    selection: Selection,
    server: ServerInfo,
    vocab: tuple[int, int],
    before: Progress | None,
    on_progress: Callable[[Tally], None],
    handle_signals: bool,
    recorder: EventRecorder | None,
    emptied: bool,
    given: GivenPrompts | None,
) -> RunResult:
    tally = Tally(selection.requests, len(selection.sessions), page_size=server.page_size or 1)
    started = time.monotonic()
    offset = before.clock_s if before is not None else 0.0

    def clock() -> float:
        return offset + time.monotonic() - started

    rules = Rules(
        config.concurrency, config.thinking, config.history, config.sharing, config.seed, vocab, config.in_flight
    )
    on_record = recorder.request if recorder is not None else ignore_record
    engine = Engine(client, writer, rules, tally, clock, on_progress, on_record, given)
    if before is None:
        writer.event(RunEvent(at_s=0.0, kind="started", requests=selection.requests))
        for drop in selection.dropped:
            writer.event(
                RunEvent(
                    at_s=0.0,
                    kind="dropped",
                    session=drop.session,
                    flow=drop.flow,
                    turn=drop.turn,
                    requests=1,
                    message=drop.reason,
                )
            )
    else:
        engine.restore(selection.sessions, before.done, before.outputs)
        left = selection.requests - len(before.done)
        writer.event(RunEvent(at_s=clock(), kind="resumed", requests=left, message=_resume_message(before, server)))
        started = time.monotonic()  # rebuilding is no part of the run
    if recorder is not None:
        recorder.begin(config.out, clock, emptied=emptied)
    if before is None or not _same_process(before.header.server, server):
        writer.metrics(METRICS_START, await client.metrics())
    with Signals(engine.interrupt, enabled=handle_signals):
        async with sampled(config.out / METRICS, client.metrics, clock, config.metrics_every_s):
            status = await engine.run(selection.sessions)
    writer.metrics(METRICS_END, await client.metrics())
    if status == "interrupted":
        aborted = engine.interrupted_requests
        message = f"{aborted} requests in flight were aborted and have no record"
        writer.event(RunEvent(at_s=clock(), kind="interrupted", requests=aborted, message=message))
    elif status == "finished":
        writer.event(RunEvent(at_s=clock(), kind="finished", requests=tally.requests))
    return RunResult(
        path=config.out,
        status=status,
        tally=tally,
        dropped_turns=len(selection.dropped),
        interrupted_requests=engine.interrupted_requests,
        wall_s=time.monotonic() - started,
    )


def _client(config: ReplayConfig, api_key: str | None) -> Client:
    if config.client == "sglang":
        return SGLangClient(config.url, timeout_s=config.request_timeout_s, api_key=api_key)
    return OpenAIClient(
        config.url,
        model=config.model,
        ignore_eos=config.ignore_eos,
        timeout_s=config.request_timeout_s,
        api_key=api_key,
    )


def _select(config: ReplayConfig, max_context: int | None, given: GivenPrompts | None = None) -> Selection:
    if given is None and (config.out / PROMPTS).exists():
        raise ReplayError(f"the prompts of {config.out} were given by a program, not read from a trace: start it anew")
    if given is not None and (config.client != "sglang" or config.history != "recorded" or config.tokens_per_block):
        raise ReplayError("given prompts are sent as they are: leave out client, history and tokens_per_block")
    limits = Limits(
        sessions=config.sessions,
        requests=config.limit_requests,
        max_turns=config.max_turns,
        max_output=config.max_output,
        tokens_per_block=config.tokens_per_block,
        max_context=max_context,
        over_limit=config.over_limit,
        shuffle=config.shuffle,
        seed=config.seed,
    )
    stats = ReadStats()
    try:
        sessions: Iterable[Session]
        if given is not None:
            sessions = given.sessions
        else:
            sessions = open_trace(config.trace, format=config.trace_format, skip_bad=config.skip_bad, stats=stats)
        selection = select(sessions, limits)
    except (OSError, ValueError) as error:
        raise ReplayError(str(error)) from error
    if not selection.sessions:
        if selection.emptied:
            raise ReplayError(
                f"nothing to send: all {len(selection.emptied)} sessions of {config.trace} are over the context "
                f"limit of {limits.max_context} tokens from their first turn on; reduce them with --tokens-per-block, "
                "or serve with a larger context"
            )
        bad = f" ({stats.skipped_sessions} bad ones skipped, first: {stats.skipped[0]})" if stats.skipped else ""
        raise ReplayError(f"nothing to send: {config.trace} holds no session{bad}")
    return selection


def context_limit(config: ReplayConfig, server: ServerInfo) -> int | None:
    """Prompt plus output that a request may have, in tokens: what was asked for, and what the server takes.

    For a text protocol the server's limit is in its own tokens, near the recorded ones at best.
    """
    takes = usable_context(server) if server.client == "sglang" else server.context_length
    return min((limit for limit in (config.max_context, takes) if limit is not None), default=None)


def _header(
    config: ReplayConfig,
    server: ServerInfo,
    selection: Selection,
    vocab: tuple[int, int],
    max_context: int | None,
    is_given: bool,
) -> RunHeader:
    trace_path = Path(config.trace)
    settings = config.model_dump(mode="json", exclude_defaults=True)
    settings["out"] = str(config.out)
    if trace_path.exists():
        settings["trace"] = str(trace_path.resolve())  # resuming may start from another directory
    chosen = ("sessions", "max_turns", "max_output", "limit_requests", "shuffle", "skip_bad")
    try:
        own_version = version("agentserve")
    except PackageNotFoundError:
        own_version = "unknown"
    return RunHeader(
        agentserve_version=own_version,
        run_id=uuid.uuid4().hex[:12],
        started_unix=time.time(),
        trace=config.trace,
        trace_sha256=selection.sha256,
        trace_format="given" if is_given else resolve_format(config.trace, config.trace_format).name,
        sessions=len(selection.sessions),
        requests=selection.requests,
        filter={name: getattr(config, name) for name in chosen} | {"max_context": max_context},
        tokens_per_block=selection.block_size,
        recorded_block_size=selection.recorded_block_size,
        prefix_sharing=config.sharing,
        history=config.history,
        concurrency=config.concurrency,
        think=config.thinking.as_dict(),
        over_limit=config.over_limit,
        seed=config.seed,
        vocab=vocab,
        server=server,
        config=settings,
    )


def _same_limit(header: RunHeader, config: ReplayConfig, server: ServerInfo) -> int | None:
    """The run's own context limit, which this server must still take: else other turns would be dropped."""
    limit: int | None = header.filter.get("max_context")
    takes = context_limit(config, server)
    if takes is not None and (limit is None or takes < limit):
        raise ReplayError(
            f"{config.out} was started with a context limit of {limit} tokens, this server takes {takes}; serve with "
            "the same context length and cache capacity as before, or start a new run"
        )
    return limit


def _check_same(header: RunHeader, selection: Selection, config: ReplayConfig) -> None:
    if header.trace_sha256 != selection.sha256:
        raise ReplayError(
            f"{config.trace} gives other requests than when {config.out} was started (digest "
            f"{selection.sha256[:12]} instead of {header.trace_sha256[:12]}): the trace has changed; restore it, or "
            "start a new run"
        )


def _same_process(before: ServerInfo, now: ServerInfo) -> bool:
    started = "startup_time"
    return before.base_url == now.base_url and before.args.get(started) == now.args.get(started)


def _resume_message(before: Progress, server: ServerInfo) -> str:
    notes = [f"{len(before.done)} records kept"]
    if before.retried:
        notes.append(f"{before.retried} requests that lost their server are sent again")
    if before.cut_lines:
        notes.append(f"{before.cut_lines} half-written last lines were cut off")
    if not _same_process(before.header.server, server):
        notes.append("the server is another process, whose cache began empty: theory still counts what was sent before")
    return "; ".join(notes)
