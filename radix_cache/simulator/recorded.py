"""Play a run that happened: every request arrives, starts and ends when it did, and the simulator says what hits.

Nothing here decides when a request runs, so the clocks of a live server and of its prediction cannot part, and what
differs is a matter of the cache alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.eviction import EvictionPolicy, eviction_policy
from radix_cache.features import FlowState
from radix_cache.simulator.jit import core, jit
from radix_cache.simulator.layout import NONE, REJECTED, Records, fate_at, flow_at, request_at
from radix_cache.simulator.run import Setting, new_cache
from radix_cache.simulator.serve import arrive, finish, set_state, start
from radix_cache.simulator.state import Cache
from radix_cache.simulator.steps import HOLD, end_request, give_back, keep, look_up, make_room, take, want_prefill
from radix_cache.simulator.uses import UNKNOWN
from radix_cache.simulator.workload import Workload

ARRIVE, START, FINISH, END = 0, 1, 2, 3
MATCH, PREFILL, KEEP, DECODE, RELEASE = 4, 5, 6, 7, 8  # of a server's steps, see ``play_steps``
_NAMES = {ARRIVE: "arrive", START: "start", FINISH: "finish"}
LIVE, ENDED = int(FlowState.LIVE), int(FlowState.ENDED)

# What happened, in order; ``which`` is a request, for END a flow. Times in seconds on one clock.
EVENT = np.dtype([("time", "f8"), ("kind", "i4"), ("which", "i4")], align=True)
STEP = np.dtype([("time", "f8"), ("kind", "i4"), ("which", "i4"), ("tokens", "i4")], align=True)


class Recorded(NamedTuple):
    """What the simulator says of a recorded run.

    Attributes:
        hit: prompt tokens served by the cache, int32, one entry a request of the workload.
        refused: requests for which the simulator had no memory left beside those that ran; they hit nothing. Of a
            run's steps: allocations that did not fit.
        evicted: tokens.
    """

    hit: npt.NDArray[np.int32]
    refused: int
    evicted: int


@jit
def _start(c: Any, which: int, spare: int) -> bool:
    """Begin a request; where memory is short without the ``spare`` tokens that the server wants at hand."""
    if start(c, which):
        return True
    if spare == 0:
        return False
    request_at(c, which).output -= spare
    return bool(start(c, which))


@core
def _arrive(c: Any, which: int) -> None:
    flow = request_at(c, which).flow
    if flow_at(c, flow).state == ENDED:
        set_state(c, flow, LIVE)
    if which != flow_at(c, flow).first:
        arrive(c, which, which - 1)


@jit
def _play(c: Any, events: Records, spare: int) -> int:
    refused = 0
    for i in range(len(events)):
        kind, which = events[i].kind, events[i].which
        c.now = events[i].time
        c.stamp += 1
        if kind == END:
            set_state(c, which, ENDED)
        elif kind == ARRIVE:
            _arrive(c, which)
        elif kind == START:
            if not _start(c, which, spare):
                fate_at(c, which).status = REJECTED
                refused += 1
        else:
            finish(c, which)
    return refused


@jit
def _play_steps(c: Any, holds: int, steps: Records) -> int:
    overfull = 0
    i = 0
    while i < len(steps):
        kind, which, tokens = steps[i].kind, steps[i].which, steps[i].tokens
        c.now = steps[i].time
        c.stamp += 1
        last = i + 1
        if kind == END:
            set_state(c, which, ENDED)
        elif kind == ARRIVE:
            _arrive(c, which)
            flow_at(c, request_at(c, which).flow).context = request_at(c, which).prompt
        elif kind == MATCH:
            look_up(c, holds, which, tokens // c.page)
        elif kind == KEEP:
            keep(c, holds, which, tokens)
        elif kind == RELEASE:
            give_back(c, holds, which)
        elif kind == FINISH:
            end_request(c, holds, which, tokens)
        else:
            # All that one step allocates is made room for at once.
            while last < len(steps) and steps[last].kind == kind and steps[last].time == c.now:
                last += 1
            wanted = 0
            for k in range(i, last):
                wanted += want_prefill(c, holds, steps[k].which, steps[k].tokens) if kind == PREFILL else c.page
            make_room(c, which, wanted)
            for k in range(i, last):
                take(c, holds, steps[k].which, steps[k].tokens if kind == PREFILL else 0)
            if c.used + c.reserved > c.capacity:
                overfull += 1
        i = last
    return overfull


def play(
    workload: Workload,
    events: Records,
    *,
    policy: str,
    capacity: int,
    truncate: bool = True,
    held_pages: npt.NDArray[np.int64] | None = None,
) -> Recorded:
    """Play recorded events on an empty cache.

    Args:
        workload: what was asked.
        events: array of ``EVENT`` in order; each request arrives, starts and finishes once.
        policy: eviction policy, one that does not need the future.
        capacity: tokens.
        truncate: whether the last victim loses only the pages that are needed.
        held_pages: for each request, the pages that it needs while it runs, prompt included; None: those of prompt
            and answer. Servers keep a page more at hand; several running requests share it when memory is short.

    Raises:
        ValueError: events that miss a request, or a policy that knows the future.
        RuntimeError: an invariant of the simulator failed; the message says to report it.
    """
    chosen = _known_policy(policy)
    _check_once(events, (ARRIVE, START, FINISH), len(workload.requests))
    cache = new_cache(workload, capacity, chosen, Setting(policy=policy, capacity=capacity, truncate=truncate), UNKNOWN)
    if held_pages is not None:
        requests = workload.requests.copy()
        # The core reckons a request's memory from the length of its answer, and nothing else but tlru looks at it.
        requests["output"] = np.maximum(held_pages * workload.page_size - requests["prompt"], 0)
        cache.put("requests", requests)
    spare = 0 if held_pages is None else workload.page_size
    refused = int(_play(cache.record, np.sort(events, order="time", kind="stable"), spare))
    return _recorded(cache, policy, refused)


def play_steps(workload: Workload, steps: Records, *, policy: str, capacity: int, truncate: bool = True) -> Recorded:
    """Play what a server's scheduler did, step by step, on an empty cache.

    What the server decided is taken from the recording: when it looked at a waiting request, how far a prefill went,
    who was in a decode step, what was taken back. What it found in its cache, what it had to evict and whom is left
    to the simulator.

    Args:
        workload: what was asked.
        steps: array of ``STEP``, in order. ``tokens`` is for MATCH how many may hit, for PREFILL where the chunk
            ends, for KEEP and FINISH how many the tree was given, all counted from the prompt's begin. PREFILL or
            DECODE steps that follow each other at one time are one allocation.
        policy: eviction policy, one that does not need the future.
        capacity: tokens.
        truncate: whether the last victim loses only the pages that are needed.

    Raises:
        ValueError: steps that miss a request, a prefill without a match, or a policy that knows the future.
        RuntimeError: an invariant of the simulator failed; the message says to report it.
    """
    chosen = _known_policy(policy)
    _check_once(steps, (ARRIVE, FINISH), len(workload.requests))
    for kind, name in ((MATCH, "match"), (PREFILL, "prefill")):
        missing = np.setdiff1d(np.arange(len(workload.requests)), steps["which"][steps["kind"] == kind])
        if len(missing):
            raise ValueError(f"each request must {name}; request {missing[0]} does not")
    splits = int(np.isin(steps["kind"], (MATCH, KEEP, FINISH)).sum())  # each splits a node at most
    setting = Setting(policy=policy, capacity=capacity, truncate=truncate)
    cache = new_cache(workload, capacity, chosen, setting, UNKNOWN, refills=splits)
    holds = np.zeros(len(workload.requests), dtype=HOLD)
    holds["lock"] = NONE
    overfull = int(_play_steps(cache.record, holds.ctypes.data, steps))
    return _recorded(cache, policy, overfull)


def _known_policy(name: str) -> EvictionPolicy:
    policy = eviction_policy(name)
    if policy.offline:
        raise ValueError(f"eviction policy {policy.name!r} knows the future: a recorded run has none to tell it")
    return policy


def _check_once(events: Records, kinds: tuple[int, ...], requests: int) -> None:
    for kind in kinds:
        seen = np.bincount(events["which"][events["kind"] == kind], minlength=requests)
        if not (seen == 1).all():
            wrong = int(np.flatnonzero(seen != 1)[0])
            raise ValueError(f"each request must {_NAMES[kind]} once; request {wrong} does {seen[wrong]} times")


def _recorded(cache: Cache, policy: str, refused: int) -> Recorded:
    if cache.record["broken"]:
        raise RuntimeError(f"the simulator broke an invariant with {policy}; please report it")
    evicted = sum(int(cache.record[f"evicted_{name}"]) for name in ("live", "parked", "ended", "superseded"))
    return Recorded(cache.fates["hit"].copy(), refused, evicted * int(cache.record["page"]))
