"""Which sessions and turns of a trace a run sends: pure, and decided before the first request."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import orjson

from traces.model import Flow, Session
from traces.reduce import DroppedTurn, OverLimit, limit_context, reduce_blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """What is taken of a trace; None means no limit.

    Attributes:
        sessions: sessions to take, counted after the other limits.
        requests: requests to take; the session that crosses it is cut in recorded order of arrival.
        max_turns: turns of each flow.
        max_output: tokens of each answer.
        tokens_per_block: block size to reduce to (``traces.reduce``).
        max_context: prompt plus output of each request, in tokens as sent.
        over_limit: what happens to a flow that goes over ``max_context``.
        shuffle: take sessions in an order drawn from ``seed`` instead of the trace's.
    """

    sessions: int | None = None
    requests: int | None = None
    max_turns: int | None = None
    max_output: int | None = None
    tokens_per_block: int | None = None
    max_context: int | None = None
    over_limit: OverLimit = "end-flow"
    shuffle: bool = False
    seed: int = 0


@dataclass(slots=True)
class Selection:
    """Sessions as they are sent.

    Attributes:
        sha256: digest of ids, structure and lengths of all of it; think times are no part of it.
        recorded_block_size: tokens per block in the trace, before reduction.
        emptied: ids of sessions of which the context limit left nothing.
    """

    sessions: list[Session] = field(default_factory=list)
    dropped: list[DroppedTurn] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    recorded_block_size: int = 0
    block_size: int = 0
    sha256: str = ""


def select(
    sessions: Iterable[Session], limits: Limits, *, on_session: Callable[[int], None] = lambda count: None
) -> Selection:
    """Apply the limits. Reads no further than needed, unless sessions are shuffled.

    The result is held in memory (8 bytes per block of every prompt): a replay of millions of blocks takes a
    while anyway.

    Raises:
        ValueError: block sizes differ within the trace; ``over_limit`` is "fail" and a request is over it.
    """
    if limits.shuffle:
        pool = list(sessions)
        random.Random(limits.seed).shuffle(pool)
        sessions = pool
    selection = Selection()
    digest = hashlib.sha256()
    for recorded in sessions:
        if selection.recorded_block_size not in (0, recorded.block_size):
            raise ValueError(
                f"session {recorded.id} has blocks of {recorded.block_size} tokens, earlier ones of "
                f"{selection.recorded_block_size}; replay them as separate traces"
            )
        selection.recorded_block_size = recorded.block_size
        session = _limited(recorded, limits, selection)
        if session is None:
            selection.emptied.append(recorded.id)
            continue
        if limits.requests is not None:
            session = first_requests(session, limits.requests - selection.requests)
        selection.sessions.append(session)
        selection.requests += session.request_count
        selection.prompt_tokens += sum(turn.prompt_tokens for flow in session.flows() for turn in flow.turns)
        selection.block_size = session.block_size
        _digest(session, digest.update)
        on_session(len(selection.sessions))
        if len(selection.sessions) == limits.sessions or selection.requests == limits.requests:
            break
    selection.sha256 = digest.hexdigest()
    return selection


def _limited(session: Session, limits: Limits, selection: Selection) -> Session | None:
    if limits.tokens_per_block is not None and limits.tokens_per_block != session.block_size:
        session = reduce_blocks(session, limits.tokens_per_block)
    session = shorten(session, limits.max_turns, limits.max_output)
    if limits.max_context is None:
        return session
    kept, dropped = limit_context(session, limits.max_context, limits.over_limit)
    selection.dropped.extend(dropped)
    return kept


def shorten(session: Session, max_turns: int | None, max_output: int | None) -> Session:
    """The first ``max_turns`` turns of every flow, with answers of at most ``max_output`` tokens.

    Subagents of main turns that are gone are gone too.
    """

    def short(flow: Flow) -> Flow:
        turns = flow.turns[:max_turns]
        if max_output is not None:
            turns = tuple(replace(turn, output_tokens=min(turn.output_tokens, max_output)) for turn in turns)
        return replace(flow, turns=turns)

    main = short(session.main)
    last = main.turns[-1].index
    subagents = [short(flow) for flow in session.subagents if flow.spawn_after is None or flow.spawn_after <= last]
    return replace(session, main=main, subagents=tuple(subagents))


def first_requests(session: Session, count: int) -> Session:
    """The first ``count`` (>= 1) requests in recorded order of arrival; at least one main turn stays."""
    if count >= session.request_count:
        return session
    kept: dict[str, int] = {session.main.name: 0}
    for flow, _ in session.turns_in_arrival_order()[:count]:
        kept[flow.name] = kept.get(flow.name, 0) + 1
    if kept[session.main.name] == 0:
        kept = {session.main.name: count}
    main = replace(session.main, turns=session.main.turns[: kept[session.main.name]])
    subagents = tuple(
        replace(flow, turns=flow.turns[: kept[flow.name]]) for flow in session.subagents if flow.name in kept
    )
    return replace(session, main=main, subagents=subagents)


def _digest(session: Session, update: Callable[[bytes], None]) -> None:
    update(orjson.dumps([session.id, session.block_size, session.scope.value]))
    for flow in session.flows():
        update(orjson.dumps([flow.name, flow.tool_tokens, flow.system_tokens, flow.spawn_after, flow.join_before]))
        for turn in flow.turns:
            update(orjson.dumps([turn.index, turn.prompt_tokens, turn.output_tokens, len(turn.block_ids)]))
            update(turn.block_ids.astype(np.dtype("<i8"), copy=False).tobytes())
