"""TraceLab rounds: lengths, times and what each round shares with the one before (``traces.readers.tracelab``).

Rounds of one session stand together. Subagents are sessions named ``SESSION/SUBAGENT``. Times are written as times
of day from 1970 on, since the format has no others; an answer whose duration is not known is taken to end when it
was sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from radix_cache.theory import common_blocks
from traces.model import MAIN_FLOW, Flow, Session, StopReason, Turn
from traces.readers.files import LINE_FILES
from traces.readers.tracelab import BLOCK_SIZE
from traces.writers.base import BLOCKS, TraceWriter, Write, lengths_loss, line_file, loss_of, register


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    with line_file(path) as line:

        def write(session: Session) -> None:
            for flow in session.flows():
                before: Turn | None = None
                for turn in flow.turns:
                    line(orjson.dumps(_round(session, flow, turn, before)))
                    before = turn

        yield write


def flow_session_id(session: Session, flow: Flow) -> str:
    """How a flow is called where every flow is a session."""
    return session.id if flow.name == MAIN_FLOW else f"{session.id}/{flow.name}"


def shared_tokens(session: Session, turn: Turn, before: Turn | None) -> int:
    """Leading tokens that a prompt repeats of the one before: whole blocks, or all of it where all its blocks are."""
    if before is None:
        return 0
    common = common_blocks(before.block_ids, turn.block_ids)
    whole = min(before.prompt_tokens, turn.prompt_tokens)
    return whole if common == len(before.block_ids) else common * session.block_size


def _round(session: Session, flow: Flow, turn: Turn, before: Turn | None) -> dict[str, Any]:
    shared = shared_tokens(session, turn, before)
    used_tool = turn.stop is StopReason.TOOL_USE
    told = "tool_result" if before is not None and before.stop is StopReason.TOOL_USE else "user_message"
    ended = turn.start_s + (turn.api_s or 0.0)
    return {
        "provider": "agentserve",
        "session_id": flow_session_id(session, flow),
        "round_index": turn.index,
        "model": turn.model,
        "input_tokens_total": turn.prompt_tokens,
        "prefix_tokens": shared,
        "newly_append_tokens": turn.prompt_tokens - shared,
        "output_tokens": turn.output_tokens,
        "timing_events": [
            {"event_type": told, "timestamp": _time(turn.start_s)},
            {"event_type": "tool_call" if used_tool else "text", "timestamp": _time(ended)},
        ],
        "tools": [{"tool_index": 0, "tool_name": "tool"}] if used_tool else [],
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds")


def _loss(session: Session) -> Counter[str]:
    kept = frozenset(["id", "start_s", "think_s", "api_s", "stop", "model"])
    lost = loss_of(session, kept=kept, clock=False, subagents=False)
    lost[BLOCKS] = lengths_loss(session, BLOCK_SIZE)
    turns = [(flow, at, turn) for flow in session.flows() for at, turn in enumerate(flow.turns)]
    # Think times are gaps between times here, an unknown stop reads as the user's turn, and a duration always is there.
    lost["think_s"] = sum(at > 0 and turn.think_s is None for _, at, turn in turns)
    lost["think_s"] += sum(turn.think_s is not None and not _gap_is(flow, at, turn.think_s) for flow, at, turn in turns)
    lost["stop"] = sum(turn.stop is StopReason.UNKNOWN for _, _, turn in turns)
    lost["api_s"] = sum(turn.api_s is None for _, _, turn in turns)
    return +lost


def _gap_is(flow: Flow, at: int, think_s: float) -> bool:
    if not at:
        return False
    before = flow.turns[at - 1]
    return abs(max(0.0, flow.turns[at].start_s - before.start_s - (before.api_s or 0.0)) - think_s) < 1e-5


register(TraceWriter("tracelab", LINE_FILES, _open, _loss))
