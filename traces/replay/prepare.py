"""What a run is going to send, and what its header says of that: settled before the first request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from traces import open_trace
from traces.model import ReadStats, Session
from traces.readers.base import resolve_format
from traces.replay.clients.sglang import usable_context
from traces.replay.config import ReplayConfig
from traces.replay.given import PROMPTS, GivenPrompts
from traces.replay.record import RunHeader, ServerInfo
from traces.replay.select import Selection, select


class ReplayError(RuntimeError):
    """A replay that could not start. The message says what to do."""


def context_limit(config: ReplayConfig, server: ServerInfo) -> int | None:
    """Prompt plus output that a request may have, in tokens: what was asked for, and what the server takes.

    For a text protocol the server's limit is in its own tokens, near the recorded ones at best.
    """
    takes = usable_context(server) if server.client == "sglang" else server.context_length
    return min((limit for limit in (config.max_context, takes) if limit is not None), default=None)


def choose(config: ReplayConfig, max_context: int | None, given: GivenPrompts | None = None) -> Selection:
    """The sessions that a run sends.

    Args:
        max_context: prompt plus output that a request may have, in tokens; None: no limit.
        given: prompts that take the place of the trace's.

    Raises:
        ReplayError: the trace cannot be read, nothing of it is left, or given prompts go with other settings.
    """
    if given is None and (config.out / PROMPTS).exists():
        raise ReplayError(f"the prompts of {config.out} were given by a program, not read from a trace: start it anew")
    if given is not None and (config.client != "sglang" or config.history != "recorded" or config.tokens_per_block):
        raise ReplayError("given prompts are sent as they are: leave out client, history and tokens_per_block")
    stats = ReadStats()
    try:
        sessions: Iterable[Session]
        if given is not None:
            sessions = given.sessions
        else:
            sessions = open_trace(config.trace, format=config.trace_format, skip_bad=config.skip_bad, stats=stats)
        selection = select(sessions, config.limits(max_context))
    except (OSError, ValueError) as error:
        raise ReplayError(str(error)) from error
    if not selection.sessions:
        if selection.emptied:
            raise ReplayError(
                f"nothing to send: all {len(selection.emptied)} sessions of {config.trace} are over the context "
                f"limit of {max_context} tokens from their first turn on; reduce them with --tokens-per-block, "
                "or serve with a larger context"
            )
        bad = f" ({stats.skipped_sessions} bad ones skipped, first: {stats.skipped[0]})" if stats.skipped else ""
        raise ReplayError(f"nothing to send: {config.trace} holds no session{bad}")
    return selection


def header_of(
    config: ReplayConfig,
    server: ServerInfo,
    selection: Selection,
    vocab: tuple[int, int],
    max_context: int | None,
    is_given: bool,
) -> RunHeader:
    """What ``run.json`` says of a run that is about to start."""
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
