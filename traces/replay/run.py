"""One replay from start to end: look at the server, choose what to send, run the engine, close the books."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from traces.model import Session, TraceError
from traces.readers.base import resolve_format
from traces.replay.clients.base import Client, ServerUnreachableError
from traces.replay.clients.openai import OpenAIClient
from traces.replay.clients.sglang import SGLangClient
from traces.replay.config import ReplayConfig
from traces.replay.engine import Engine, Rules, Status, ignore_record
from traces.replay.events import EventError
from traces.replay.events_zmq import EventRecorder, recorder_for
from traces.replay.given import GivenPrompts, write_prompts
from traces.replay.metrics import METRICS, sampled
from traces.replay.prepare import ReplayError, choose, context_limit, header_of
from traces.replay.record import RunEvent, ServerInfo
from traces.replay.resume import check_same, resume_message, same_limit, same_process
from traces.replay.select import Selection
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

__all__ = ["ReplayError", "RunResult", "replay", "replayed_sessions", "resumed_config"]


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
    selection = choose(config, run.header.filter.get("max_context"))
    check_same(run.header, selection, config)
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
        if given is None:
            resolve_format(config.trace, config.trace_format)  # a mistyped path is no matter for a server
        server = await client.info()
        vocab = (header and header.vocab) or config.vocab or await client.vocabulary()
        if vocab is None:
            raise ReplayError(
                f"{config.url} does not tell its vocabulary and its checkpoint ({server.model}) is not readable here; "
                "give a range of ordinary token ids, such as --vocab 1000:100000"
            )
        # Reading a large trace takes a while; whatever else can fail was tried before.
        limit = context_limit(config, server) if header is None else same_limit(header, config, server)
        selection = choose(config, limit, given)
        before = None
        recorder, emptied = recorder_for(config.events, server), False
        if header is not None:
            check_same(header, selection, config)
            writer, before = reopen(config.out)
        else:
            # A resumed run leaves the cache alone: what the run has sent is meant to be in it.
            if config.client == "sglang" if config.flush_cache is None else config.flush_cache:
                await client.flush_cache()
                emptied = recorder is not None and await recorder.sees_flush(client.flush_cache)
            made = header_of(config, server, selection, vocab, limit, given is not None)
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
        writer.event(RunEvent(at_s=clock(), kind="resumed", requests=left, message=resume_message(before, server)))
        started = time.monotonic()  # rebuilding is no part of the run
    if recorder is not None:
        recorder.begin(config.out, clock, emptied=emptied)
    if before is None or not same_process(before.header.server, server):
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
