"""What a replay writes down: one JSON line per request, written when the request ends.

A run is a directory::

    RUN/run.json         RunHeader: what was replayed, against which server, with which settings
    RUN/requests.jsonl   RequestRecord, one per line, in order of completion
    RUN/events.jsonl     RunEvent: turns dropped, server lost, interrupted, resumed, finished; ends told to the server
    RUN/outputs.jsonl, RUN/retried.jsonl   see ``store``
    RUN/metrics.jsonl      the server's counters (KV use, running and waiting requests, policies, offload) every few
                           seconds on the run's clock; read with ``metrics.read_metrics``
    RUN/kv_events.jsonl    what the cache stored and dropped, see ``events``
    RUN/report.json, RUN/report.html   written by ``agentserve report``

All times are seconds on one monotonic clock that starts with the run (``RunHeader.started_unix`` places it). A
resumed run takes the clock up where it stopped, so that the pause is no part of any duration.
Token counts that end in ``_lcp`` are lengths of a longest common prefix with *earlier requests of this run*,
in tokens, at page size 1 and not capped: ``radix_cache.rates`` turns them into hit tokens for a page size.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Speculation(_Model):
    """How the server drafts."""

    algorithm: str
    drafts: int | None = None  # a verification step
    # real: drafts are kept where the model would have written them. synthetic: as many as ``length`` asks for, so that
    # only times mean anything. unknown: the server does not say, as one that agentserve did not launch.
    mode: Literal["real", "synthetic", "unknown"] = "unknown"
    length: float | None = None  # synthetic tokens per step
    keys: Literal["token", "pair"] | None = None  # of the radix tree; None: the server does not say


class ServerInfo(_Model):
    """What the server said of itself; None where it did not say."""

    base_url: str
    client: Literal["sglang", "openai"]
    engine_version: str | None = None
    model: str | None = None
    page_size: int | None = None
    context_length: int | None = None
    kv_capacity_tokens: int | None = None
    # Whether the server has agentserve's policies and was told conversations, stop reasons and ends.
    names_sessions: bool = False
    speculation: Speculation | None = None  # None: it does not draft
    args: dict[str, Any] = Field(default_factory=dict)  # the server's own arguments, as reported


class RunHeader(_Model):
    """``run.json``: what is replayed, how and against what; lengths in tokens."""

    schema_version: int = SCHEMA_VERSION
    agentserve_version: str
    run_id: str
    started_unix: float
    trace: str  # name of the file, directory or generator as given
    trace_sha256: str  # digest of what was replayed (ids, lengths), after filter and reduction
    trace_format: str
    sessions: int
    requests: int
    filter: dict[str, Any] = Field(default_factory=dict)  # limits on sessions, turns, context
    tokens_per_block: int  # block size as sent
    recorded_block_size: int  # block size in the trace; differs when the trace was reduced
    prefix_sharing: Literal["session", "tools+system"]  # whether sessions share tools + system tokens
    history: Literal["recorded", "own"]  # recorded continuation, or the server's own output, as history
    concurrency: int
    think: dict[str, Any]  # mode, scale, cap
    over_limit: Literal["end-flow", "drop-turn", "fail"]
    seed: int
    vocab: tuple[int, int] | None = None  # half-open range of the token ids that prompts are made of
    server: ServerInfo
    config: dict[str, Any] = Field(default_factory=dict)  # ReplayConfig less its defaults, for --resume


class RequestError(_Model):
    """Why a request counts as failed."""

    kind: Literal["http", "connection", "timeout", "length_mismatch", "short_output", "protocol"]
    message: str


class OffloadAnswer(_Model):
    """What a request heard from agentserve's offload tier (``agentserve.runtime.request_facts.Facts``)."""

    lookup: Literal["hit", "miss", "late", "offline"]
    found: int = 0  # tokens, from the prompt's beginning, that the tier said it has
    refused_from: int | None = None  # tokens before the first page that was not asked for
    load: Literal["restored", "late", "refused", "failed"] | None = None
    # Tokens restored from the Redis behind the daemon's host memory, where the daemon tells; SGLang counts all that an
    # offload tier restores as ``cached_storage``.
    from_storage: int | None = None


class RequestRecord(_Model):
    """A line of ``requests.jsonl``, written when the request ended; lengths in tokens, times in seconds of the run."""

    # identity
    session: str
    flow: str
    turn: int
    # schedule and clock
    ready_s: float  # previous turn's end plus think time: when the request could be sent
    sent_s: float
    first_token_s: float | None
    done_s: float
    think_s: float  # think time that was waited before it
    # tokens
    prompt_tokens: int  # as built
    prompt_tokens_reported: int | None  # as counted by the server
    output_tokens_wanted: int
    output_tokens: int
    output_sha256: str | None = None  # digest of the output token ids (or text): equality across runs
    # cache, as reported by the server; None where it did not report
    cached_tokens: int | None
    cached_device: int | None = None
    cached_host: int | None = None
    cached_storage: int | None = None
    offload: OffloadAnswer | None = None  # None: no such tier, or it was not asked
    held_s: float | None = None  # seconds that agentserve's admission held it back; None: not at all
    # Seconds in the server's queue before its first pass, admission's hold included; None: the server does not say.
    queued_s: float | None = None
    # speculation: verification steps by the number of drafts accepted, from 0; None where there was no step. The last
    # step can accept beyond the end of the output.
    accepted_drafts: list[int] | None = None
    # theory: longest common prefix with what earlier requests of the run left behind
    session_lcp: int  # with earlier prompts of the same session
    session_output_lcp: int  # with earlier prompts and the outputs whose KV exists, same session
    shared_lcp: int  # as session_lcp, over all sessions
    shared_output_lcp: int  # as session_output_lcp, over all sessions
    ready_lcp: int  # as shared_output_lcp, but only what was computed before this request was sent
    # recorded facts carried along
    recorded_stop: str = ""
    finish_reason: str | None = None
    error: RequestError | None = None


class RunEvent(_Model):
    """A line of ``events.jsonl``; ``at_s`` in seconds of the run."""

    at_s: float
    # ended: the server was told that a session (flow is None) or one flow is over; end_failed: it did not take it.
    kind: Literal["started", "resumed", "dropped", "server_lost", "interrupted", "finished", "ended", "end_failed"]
    session: str | None = None
    flow: str | None = None
    turn: int | None = None
    requests: int | None = None  # how many requests the event concerns
    message: str = ""
