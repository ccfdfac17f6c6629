"""The scheduler's sessions as a small file, since counters cannot carry them to the HTTP process.

The file lies in the folder in which SGLang's processes share their counters, one a scheduler. It is replaced whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentserve.runtime.policy_sessions import Session, SessionTable
from radix_cache.features import FlowState, Stop

SHOWN = 200  # sessions written, those seen last
_NAME = "agentserve_watch_{}.json"


class SessionRow(msgspec.Struct, frozen=True):
    """One session as the policies know it.

    Attributes:
        state: running, tool_wait, user_wait, wait, ended.
        admission: started, parked or waiting (for its start).
        context: tokens of its conversations that have not ended.
        idle_s: seconds since its last sign of life.
        flows: conversations: 1, and one a subagent.
    """

    session: str
    state: str
    admission: str
    context: int
    idle_s: float
    flows: int


class SchedulerState(msgspec.Struct, frozen=True):
    """What one scheduler says of itself.

    Attributes:
        at_unix: when.
        eviction, admission: policies of ours, as their specifications; empty: SGLang's own.
        sessions: the latest; empty without a policy of ours, which alone knows sessions.
        sessions_known: how many there are.
    """

    at_unix: float
    eviction: str
    admission: str
    sessions: list[SessionRow]
    sessions_known: int


class Choice(NamedTuple):
    """The policies' specifications."""

    eviction: str = ""
    admission: str = ""


_WAITS = {Stop.TOOL: "tool_wait", Stop.TURN: "user_wait"}


def scheduler_state(table: SessionTable | None, choice: Choice, now: float, at_unix: float) -> SchedulerState:
    """A snapshot.

    Args:
        table: of the policies; None without one.
        choice: which policies.
        now: the table's clock, in seconds.
        at_unix: wall clock, in seconds.
    """
    sessions = list(table.sessions()) if table is not None else []
    seen = sorted(sessions, key=lambda s: max((f.seen for f in s.flows), default=0.0), reverse=True)
    return SchedulerState(at_unix, *choice, [_row(s, now) for s in seen[:SHOWN]], len(sessions))


def _row(session: Session, now: float) -> SessionRow:
    newest = max(session.flows, key=lambda flow: flow.seen)
    if all(flow.state == FlowState.ENDED for flow in session.flows):
        state = "ended"
    elif any(flow.request is not None for flow in session.flows):
        state = "running"
    else:
        state = _WAITS.get(newest.stop, "wait")
    admission = "parked" if session.parked else "started" if session.started else "waiting"
    return SessionRow(session.id, state, admission, session.context, max(0.0, now - newest.seen), len(session.flows))


def write_state(folder: Path, state: SchedulerState) -> None:
    """Replace this process's file."""
    path = folder / _NAME.format(os.getpid())
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(msgspec.json.encode(state))
    unfinished.replace(path)


def read_states(folder: Path) -> list[SchedulerState]:
    """The files of all schedulers. One that is not whole or of another version is left out."""
    found = []
    for path in sorted(folder.glob(_NAME.format("*"))):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=SchedulerState))
        except (OSError, msgspec.MsgspecError):
            continue
    return found


def states(rows: Iterable[SessionRow]) -> dict[str, int]:
    """How many sessions are in each state."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    return counts


def as_dict(state: SchedulerState) -> dict[str, Any]:
    """For JSON."""
    made: dict[str, Any] = msgspec.to_builtins(state)
    return made
