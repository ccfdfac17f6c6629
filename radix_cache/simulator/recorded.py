"""Play a run that happened: every request arrives, starts and ends when it did, and the simulator says what hits.

Nothing here decides when a request runs, so the clocks of a live server and of its prediction cannot part, and what
differs is a matter of the cache alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.eviction import eviction_policy
from radix_cache.simulator.jit import jit
from radix_cache.simulator.layout import REJECTED, Records, fate_at, flow_at, request_at
from radix_cache.simulator.run import Setting, new_cache
from radix_cache.simulator.serve import arrive, finish, set_state, start
from radix_cache.simulator.uses import UNKNOWN
from radix_cache.simulator.workload import Workload

ARRIVE, START, FINISH, END = 0, 1, 2, 3
LIVE, ENDED = 0, 2

# What happened, in order; ``which`` is a request, for END a flow. Times in seconds on one clock.
EVENT = np.dtype([("time", "f8"), ("kind", "i4"), ("which", "i4")], align=True)


class Recorded(NamedTuple):
    """What the simulator says of a recorded run.

    Attributes:
        hit: prompt tokens served by the cache, int32, one entry a request of the workload.
        refused: requests for which the simulator had no memory left beside those that ran; they hit nothing.
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
            flow = request_at(c, which).flow
            if flow_at(c, flow).state == ENDED:
                set_state(c, flow, LIVE)
            if which != flow_at(c, flow).first:
                arrive(c, which, which - 1)
        elif kind == START:
            if not _start(c, which, spare):
                fate_at(c, which).status = REJECTED
                refused += 1
        else:
            finish(c, which)
    return refused


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
    chosen = eviction_policy(policy)
    if chosen.offline:
        raise ValueError(f"eviction policy {chosen.name!r} knows the future: a recorded run has none to tell it")
    for kind, name in ((ARRIVE, "arrive"), (START, "start"), (FINISH, "finish")):
        seen = np.bincount(events["which"][events["kind"] == kind], minlength=len(workload.requests))
        if not (seen == 1).all():
            wrong = int(np.flatnonzero(seen != 1)[0])
            raise ValueError(f"each request must {name} once; request {wrong} does {seen[wrong]} times")
    cache = new_cache(workload, capacity, chosen, Setting(policy=policy, capacity=capacity, truncate=truncate), UNKNOWN)
    if held_pages is not None:
        requests = workload.requests.copy()
        # The core reckons a request's memory from the length of its answer, and nothing else but tlru looks at it.
        requests["output"] = np.maximum(held_pages * workload.page_size - requests["prompt"], 0)
        cache.put("requests", requests)
    spare = 0 if held_pages is None else workload.page_size
    refused = int(_play(cache.record, np.sort(events, order="time", kind="stable"), spare))
    if cache.record["broken"]:
        raise RuntimeError(f"the simulator broke an invariant with {policy}, {capacity}; please report it")
    evicted = sum(int(cache.record[f"evicted_{name}"]) for name in ("live", "parked", "ended", "superseded"))
    return Recorded(cache.fates["hit"].copy(), refused, evicted * workload.page_size)
