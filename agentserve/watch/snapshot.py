"""What the page and the terminal show, as one JSON object. Pure.

``SCHEMA_VERSION`` is raised when a field changes its meaning; fields may be added.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from agentserve.watch.fates import Fates
from agentserve.watch.points import LOOKUP_OUTCOMES, OFFLOAD_EVENTS, TIERS, VICTIMS, Counted, Point, Ring
from agentserve.watch.state import SchedulerState, as_dict, states

SCHEMA_VERSION = 1
WINDOWS_S = (60.0, 300.0, 900.0)

FATE_TITLES = {
    "hit": "hit",
    "in_flight": "still being computed by another request",
    "lost": "computed before, not in the cache any more",
    "new": "never seen before",
}
VICTIM_TITLES = {
    "superseded": "superseded branch",
    "ended": "ended session",
    "parked": "parked session",
    "shared": "shared prefix",
    "waits_tool": "waited for a tool",
    "waits_turn": "waited for its user",
    "waits_unknown": "waited, for what is not known",
    "unknown": "not known whose",
}


def snapshot(
    ring: Ring, schedulers: Sequence[SchedulerState], server: dict[str, Any], at_unix: float
) -> dict[str, Any]:
    """The server as it is, and what it did in the last minutes.

    Args:
        ring: points so far, at least one.
        schedulers: what they published.
        server: facts that do not change, shown as they are.
        at_unix: wall clock, in seconds.
    """
    points = ring.points()
    last = points[-1]
    rows = [row for state in schedulers for row in state.sessions]
    return {
        "schema_version": SCHEMA_VERSION,
        "at_unix": at_unix,
        "server": server,
        "now": {
            "running": last.running,
            "queued": last.queued,
            "kv_usage": last.usage,
            "kv_tokens": last.kv_tokens,
            "sessions_waiting": last.sessions_waiting,
            "sessions_parked": last.sessions_parked,
            "offload_online": last.offload_online,
        },
        "windows": [_window(ring, last, seconds) for seconds in WINDOWS_S],
        "since_start": _counted(last.counted),
        "series": [_step(one, other) for one, other in pairwise(points)],
        "session_states": states(rows),
        "sessions_known": sum(state.sessions_known for state in schedulers),
        "schedulers": [as_dict(state) for state in schedulers],
        "evidence": evidence(last, schedulers, at_unix),
    }


def _window(ring: Ring, last: Point, seconds: float) -> dict[str, Any]:
    first = ring.before(last.at - seconds) or last
    covered = last.at - first.at
    made = _counted(last.counted.since(first.counted) if covered > 0 else last.counted.since(last.counted))
    return {"seconds": seconds, "covered_s": covered, **made}


def _counted(counted: Counted) -> dict[str, Any]:
    total = sum(counted.fates)
    lost = counted.fates.lost + counted.fates.in_flight
    return {
        "prompts": counted.prompts,
        "prompt_tokens": total,
        "fates": counted.fates._asdict(),
        "hit_rate": counted.fates.hit / total if total else None,
        # An unlimited cache with the same pages would have hit these too.
        "possible_rate": (counted.fates.hit + lost) / total if total else None,
        "generated_tokens": counted.generated,
        "cached_by_tier": dict(zip(TIERS, counted.tiers, strict=True)),
        "evicted_tokens": counted.evicted,
        "evicted_by_victim": {v: n for v, n in zip(VICTIMS, counted.victims, strict=True) if n},
        "offload": {e: n for e, n in zip(OFFLOAD_EVENTS, counted.offload, strict=True) if n},
        "offload_lookups": {o: n for o, n in zip(LOOKUP_OUTCOMES, counted.lookups, strict=True) if n},
    }


def _step(one: Point, other: Point) -> dict[str, float | None]:
    fates: Fates = other.counted.since(one.counted).fates
    total = sum(fates)
    return {
        "at": other.at,
        "hit_rate": fates.hit / total if total else None,
        "possible_rate": (total - fates.new) / total if total else None,
        "kv_usage": other.usage,
        "running": other.running,
        "queued": other.queued,
    }


def evidence(last: Point, schedulers: Sequence[SchedulerState], at_unix: float) -> list[str]:
    """What the numbers rest on, and what they cannot say; one sentence each."""
    said = [
        "Fates are counted by the scheduler when a prompt's prefill begins, in whole pages of everything it has seen "
        "since its start.",
        "Tokens lost were evicted, cleared or never admitted: counters cannot tell which; a replay with cache events "
        "and agentserve report can.",
    ]
    if not any(state.eviction for state in schedulers):
        said.append("Sessions and victims are known only to agentserve's policies (launch with --policy).")
    else:
        said.append("Evictions by victim are all evictions of the window, not only those that a prompt missed.")
    if last.offload_online is None:
        said.append("No offload tier of agentserve is in use.")
    old = [at_unix - state.at_unix for state in schedulers if at_unix - state.at_unix > 30]
    if old:
        said.append(f"The list of sessions is {max(old):,.0f} s old: the scheduler has had nothing to do since.")
    if not schedulers:
        said.append("No scheduler has published its state yet: it does so with its first request.")
    return said
