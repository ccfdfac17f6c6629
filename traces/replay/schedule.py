"""When a turn may be sent: pure rules, no clock and no I/O.

In a flow, a turn is ready at the previous turn's end plus its think time. A subagent is ready at the end of the
main turn that spawned it plus its recorded delay; a main turn that joins subagents also waits for their ends.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple, cast

from traces.model import Flow, Session

ThinkMode = Literal["recorded", "scaled", "capped", "none"]


class Think(NamedTuple):
    """How a recorded think time becomes the one that is waited."""

    mode: ThinkMode
    scale: float = 1.0  # factor, for mode "scaled"
    cap_s: float | None = None  # upper bound in seconds, after scaling

    @classmethod
    def parse(cls, text: str) -> Think:
        """Read ``recorded``, ``none``, ``scaled:FACTOR``, ``capped:SECONDS`` or ``scaled:FACTOR,capped:SECONDS``.

        Raises:
            ValueError: any other text; the message lists what is accepted.
        """
        if text in ("recorded", "none"):
            return cls(cast(ThinkMode, text))
        found = re.fullmatch(r"scaled:([^,]+?)(?:,capped:([^,]+))?|capped:([^,]+)", text)
        scale, cap = (_number(part) for part in (found[1], found[2] or found[3])) if found else (-1.0, -1.0)
        if (scale is None or scale >= 0) and (cap is None or cap >= 0):
            return cls("capped", cap_s=cap) if scale is None else cls("scaled", scale=scale, cap_s=cap)
        raise ValueError(
            f"think time {text!r} is not understood; give recorded, none, scaled:FACTOR (such as scaled:0.1), "
            "capped:SECONDS (such as capped:60) or scaled:FACTOR,capped:SECONDS"
        )

    def wait_s(self, recorded_s: float) -> float:
        """Seconds to wait for a recorded think time of ``recorded_s`` seconds (>= 0)."""
        if self.mode == "none":
            return 0.0
        scaled = recorded_s * self.scale
        return scaled if self.cap_s is None else min(scaled, self.cap_s)

    def as_dict(self) -> dict[str, Any]:
        return {"mode": self.mode, "scale": self.scale, "cap_s": self.cap_s}


def _number(text: str | None) -> float | None:
    """A number of 0 or more, -1 for anything else, None where nothing was given."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        return -1.0
    return value if math.isfinite(value) else -1.0


def recorded_think_s(session: Session, flow: Flow, position: int) -> float:
    """Think time in seconds, as recorded, before ``flow.turns[position]``; never negative.

    Where the trace has none it is the difference of the recorded arrivals less the predecessor's recorded
    duration; 0 where that duration is missing too, because the difference then is mostly serving time.
    The first turn of a flow waits from what started it: its main turn's end, or the session's start.
    """
    turn = flow.turns[position]
    if position > 0:
        if turn.think_s is not None:
            return max(0.0, turn.think_s)
        before = flow.turns[position - 1]
        return 0.0 if before.api_s is None else max(0.0, turn.start_s - before.start_s - before.api_s)
    if flow.spawn_after is None:
        first_start = min(other.turns[0].start_s for other in session.flows())
        return max(0.0, turn.start_s - first_start)
    spawner = spawning_turn(session, flow)
    if spawner is None:
        return 0.0
    cause = session.main.turns[spawner]
    return 0.0 if cause.api_s is None else max(0.0, turn.start_s - cause.start_s - cause.api_s)


def spawning_turn(session: Session, flow: Flow) -> int | None:
    """Position in the main flow of the turn whose end starts ``flow``; None when it starts with the session.

    The recorded spawner may have been dropped (context limit): then the next turn kept takes its place, or the
    last one.
    """
    if flow.spawn_after is None:
        return None
    turns = session.main.turns
    return next((k for k, turn in enumerate(turns) if turn.index >= flow.spawn_after), len(turns) - 1)


def joined_flows(session: Session, position: int) -> list[Flow]:
    """Subagents whose end the main turn at ``position`` waits for, in session order.

    A subagent joins before the first kept main turn at or after ``join_before``. One that this turn or a later
    one spawns is left out: a turn that waited for it would wait for ever.
    """
    turns = session.main.turns
    earlier = turns[position - 1].index if position else -1
    joined = []
    for flow in session.subagents:
        if flow.join_before is None or not earlier < flow.join_before <= turns[position].index:
            continue
        spawner = spawning_turn(session, flow)
        if spawner is None or spawner < position:
            joined.append(flow)
    return joined
