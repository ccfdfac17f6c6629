"""Reductions that keep a session's structure, so that real sessions run on a model with a tiny context.

``reduce_blocks`` makes every block smaller; ``limit_context`` drops what still does not fit and says what.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from traces.model import Flow, Session, TraceError, Turn

OverLimit = Literal["end-flow", "drop-turn", "fail"]


class DroppedTurn(NamedTuple):
    """A turn that a limit took out."""

    session: str
    flow: str
    turn: int  # its recorded index in the flow
    reason: str


def reduce_blocks(session: Session, tokens_per_block: int) -> Session:
    """The same session with blocks of ``tokens_per_block`` instead of ``session.block_size`` tokens.

    With k new and B recorded tokens per block:

    - prompt: k tokens for each full block, and ``floor(tail * k / B)`` for the tail, at least 1 in all;
    - output: ``round(output * k / B)``, at least 1, but 0 stays 0;
    - tool and system tokens: ``round(length * k / B)``.

    Kept exactly: block ids and with them every common prefix of two prompts in blocks, the number and order
    of turns, think times, recorded times, stop reasons, spawns and joins. Not kept: the tail is rounded
    down, so lengths are k / B of the recorded ones only to within a token per prompt and one per output, and
    an output that was shorter than a block may fill a larger share of it. A page of a server covers B / k
    times as many recorded blocks.

    Raises:
        ValueError: unless ``2 <= tokens_per_block <= session.block_size``. One token per block would leave
            no room for a tail.
    """
    recorded = session.block_size
    if not 2 <= tokens_per_block <= recorded:
        raise ValueError(
            f"session {session.id}: tokens per block must be from 2 to the recorded block size {recorded}, "
            f"got {tokens_per_block}"
        )

    def length(tokens: int) -> int:
        return round(tokens * tokens_per_block / recorded)

    def turn(old: Turn) -> Turn:
        blocks = len(old.block_ids)
        tail = old.prompt_tokens - blocks * recorded
        prompt = blocks * tokens_per_block + tail * tokens_per_block // recorded
        output = max(1, length(old.output_tokens)) if old.output_tokens else 0
        return replace(old, prompt_tokens=max(1, prompt), output_tokens=output)

    def flow(old: Flow) -> Flow:
        return replace(
            old,
            turns=tuple(turn(t) for t in old.turns),
            tool_tokens=length(old.tool_tokens),
            system_tokens=length(old.system_tokens),
        )

    return replace(
        session,
        block_size=tokens_per_block,
        main=flow(session.main),
        subagents=tuple(flow(f) for f in session.subagents),
    )


def limit_context(session: Session, max_tokens: int, mode: OverLimit) -> tuple[Session | None, list[DroppedTurn]]:
    """Take out turns whose prompt plus output exceeds ``max_tokens``.

    Args:
        session: left unchanged.
        max_tokens: context of the server, in tokens.
        mode: ``end-flow`` ends a flow before its first such turn, and subagents that later turns started are
            gone too; ``drop-turn`` leaves out single turns; ``fail`` refuses the session.

    Returns:
        What is left, or None if no turn of the main flow is; and every turn that was dropped. Turns keep their
        recorded ``index``.

    Raises:
        TraceError: in mode ``fail``, naming the first turn that does not fit.
        ValueError: ``max_tokens`` below 2, the smallest request.
    """
    if max_tokens < 2:
        raise ValueError(f"a context needs at least 2 tokens, got {max_tokens}")
    dropped: list[DroppedTurn] = []
    main = _limited(session, session.main, max_tokens, mode, dropped)
    subagents: list[Flow] = []
    for recorded in session.subagents:
        gone = _spawner_gone(recorded, main) if mode == "end-flow" or main is None else None
        if gone is not None:
            dropped += [DroppedTurn(session.id, recorded.name, turn.index, gone) for turn in recorded.turns]
            continue
        flow = _limited(session, recorded, max_tokens, mode, dropped)
        if flow is not None:
            subagents.append(flow)
    if main is None:
        return None, dropped
    if not dropped:
        return session, dropped
    return replace(session, main=main, subagents=tuple(subagents)), dropped


def _spawner_gone(flow: Flow, main: Flow | None) -> str | None:
    if main is None:
        return "nothing of the main flow is left"
    if flow.spawn_after is not None and flow.spawn_after > main.turns[-1].index:
        return f"turn {flow.spawn_after} of the main flow, which started it, was dropped"
    return None


def _limited(session: Session, flow: Flow, max_tokens: int, mode: OverLimit, dropped: list[DroppedTurn]) -> Flow | None:
    kept: list[Turn] = []
    ended_by: int | None = None
    for turn in flow.turns:
        reason = None
        if ended_by is not None:
            reason = f"its flow was ended before turn {ended_by}"
        elif turn.prompt_tokens + turn.output_tokens > max_tokens:
            reason = (
                f"prompt of {turn.prompt_tokens} and output of {turn.output_tokens} tokens exceed the context "
                f"of {max_tokens}"
            )
            if mode == "fail":
                raise TraceError(
                    f"{reason}; use a larger context, fewer tokens per block, or end-flow or drop-turn",
                    file=session.source or "trace",
                    session=session.id,
                    flow=flow.name,
                    turn=turn.index,
                    field="in",
                )
            ended_by = turn.index if mode == "end-flow" else None
        if reason is None:
            kept.append(turn)
        else:
            dropped.append(DroppedTurn(session.id, flow.name, turn.index, reason))
    return replace(flow, turns=tuple(kept)) if kept else None
