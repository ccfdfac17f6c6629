"""Run one setting of the simulator on a workload."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from radix_cache.admission import admission_policy
from radix_cache.admission.base import AdmissionPolicy, always
from radix_cache.eviction import EvictionPolicy, eviction_policy
from radix_cache.simulator.evictions import empty_log
from radix_cache.simulator.jit import compiled_admission
from radix_cache.simulator.layout import NODE, NONE, ROOT
from radix_cache.simulator.loop import admit
from radix_cache.simulator.loop import run as run_events
from radix_cache.simulator.outcome import Outcome as Outcome
from radix_cache.simulator.outcome import Played, outcome_of, played_by
from radix_cache.simulator.sequential import Sequence, is_sequence, play, sequence_of
from radix_cache.simulator.state import Cache, Loop
from radix_cache.simulator.uses import UNKNOWN, Future, fits, known_future
from radix_cache.simulator.workload import Workload

UNBOUNDED = 1 << 40  # tokens: more than any trace has


class Service(IntEnum):
    """How long a request takes.

    FIXED: its recorded duration, whatever hits (answer tokens over decode speed where none is recorded). The order
    of requests then does not depend on the cache, so policies are compared on the same requests.
    PARALLEL: missed tokens over prefill speed, then answer tokens over decode speed, each request by itself.
    QUEUED: as PARALLEL, but one prefill runs at a time, first come first served.
    """

    FIXED = 0
    PARALLEL = 1
    QUEUED = 2


@dataclass(frozen=True)
class Setting:
    """One point of a grid. Lengths in tokens, times in seconds, speeds in tokens per second."""

    policy: str = "lru"
    capacity: int = UNBOUNDED
    sessions: int = 28  # clients at once
    think_cap: float = math.inf
    order_seed: int | None = None  # None: as in the trace
    admission: str = "none"
    service: Service = Service.PARALLEL
    prefill_speed: float = 10_000.0
    decode_speed: float = 80.0
    truncate: bool = True  # False: evict whole radix nodes
    insert_output: bool = True
    # Pages that a running request takes beside those of its prompt and answer, where there is room. SGLang 0.5.23 frees
    # one more than a prefill or a step can need (mem_cache/allocation.py), which counts where pages are few.
    spare_pages: int = 0
    host_capacity: int = 0
    host_policy: str = "lru"
    host_takes_all: bool = False  # False: what may be asked for again, by the rule of ``radix_cache.admission.host``
    write_through: bool = False
    restore_speed: float = 200_000.0


def simulate(
    workload: Workload,
    setting: Setting,
    *,
    reference: Outcome | None = None,
    progress: Callable[[int], None] | None = None,
    log_evictions: bool = False,
) -> Outcome:
    """Play the workload once.

    Args:
        workload: what to play.
        setting: how.
        reference: an earlier outcome with the same order of requests, from which ``belady`` learns the future;
            computed with an unbounded cache when it is needed and not given.
        progress: called with the number of requests handled, now and then.
        log_evictions: keep what left the cache, and for which request (``Outcome.log``).

    Raises:
        ValueError: unknown policy, a capacity below one page, or a setting that makes no sense.
        RuntimeError: an invariant of the simulator failed; the message says to report it.
    """
    _check(setting, workload.page_size)
    room = 4 * len(workload.requests) if log_evictions else 0
    while True:
        outcome, wanted = _simulate(workload, setting, reference, progress, room)
        if wanted <= room or not log_evictions:
            return outcome
        room = wanted  # nothing in a run is random: the second time the log has the room it needs


def _simulate(
    workload: Workload,
    setting: Setting,
    reference: Outcome | None,
    progress: Callable[[int], None] | None,
    log_room: int,
) -> tuple[Outcome, int]:
    """One run, and how much room the log would have needed."""
    policy = eviction_policy(setting.policy)
    host_policy = eviction_policy(setting.host_policy)
    future = _future(workload, setting, policy.offline or host_policy.offline, reference)
    sequence = None if log_room else _sequence(workload, setting, future)
    if sequence is not None:
        return _simulate_sequence(workload, setting, sequence, progress), 0
    cache = new_cache(workload, setting.capacity, policy, setting, future)
    cache.keep_log(log_room)
    cache.record["spare"] = setting.spare_pages
    host = cache
    if setting.write_through and setting.host_capacity:
        host = new_cache(workload, setting.host_capacity, host_policy, setting, future)
    elif setting.host_capacity:
        cache.add_host_tier(setting.host_capacity, host_policy)
        cache.record["host_takes_all"] = setting.host_takes_all
    loop = _loop(workload, setting)
    admit(loop.record, cache.record)
    while not run_events(loop.record, cache.record, host.record, 1 << 16):
        if progress:
            progress(int((cache.fates["done_stamp"] > 0).sum()))
    if progress:
        progress(len(workload.requests))
    if cache.record["broken"] or host.record["broken"] or (cache.fates["done_stamp"] == 0).any():
        raise _broken(setting)
    return outcome_of(workload, setting, played_by(cache, loop, workload.page_size)), int(cache.record["logged"])


def _sequence(workload: Workload, setting: Setting, future: Future) -> Sequence | None:
    """The order of requests where they come one at a time, under a policy that ``sequential`` knows, else None."""
    one_at_a_time = (
        setting.sessions == 1
        and setting.policy in ("lru", "belady")
        and setting.truncate
        and setting.spare_pages == 0
        and setting.host_capacity == 0
        and _admits_all(admission_policy(setting.admission))
        and is_sequence(workload)
    )
    if not one_at_a_time:
        return None
    if future is UNKNOWN:
        return sequence_of(future, session_order(workload, setting.order_seed))
    known = _sequences.setdefault(future, {})
    if setting.order_seed not in known:
        known[setting.order_seed] = sequence_of(future, session_order(workload, setting.order_seed))
    return known[setting.order_seed]


def _simulate_sequence(
    workload: Workload, setting: Setting, sequence: Sequence, progress: Callable[[int], None] | None
) -> Outcome:
    played = play(
        workload,
        sequence,
        capacity=setting.capacity,
        insert_output=setting.insert_output,
        service=setting.service,
        think_cap=setting.think_cap,
        prefill=setting.prefill_speed,
        decode=setting.decode_speed,
    )
    if progress:
        progress(len(workload.requests))
    if played.broken:
        raise _broken(setting)
    nobody_waits = np.zeros(1)
    # Whoever used what is evicted has ended: each session is one request, and none runs.
    evicted = {"live": 0, "parked": 0, "ended": played.evicted * workload.page_size, "superseded": 0}
    mean_context = float(played.area / played.busy) if played.busy else 0.0
    return outcome_of(
        workload,
        setting,
        Played(
            fates=played.fates,
            hit_tokens=played.hit_tokens,
            host_tokens=0,
            rejected=played.rejected,
            seconds=played.seconds,
            waits=nobody_waits,
            start_waits=nobody_waits,
            evicted=evicted,
            evictions=played.evictions,
            rebuilds=0,
            parkings=0,
            mean_context=mean_context,
            log=empty_log(0),
        ),
    )


def _broken(setting: Setting) -> RuntimeError:
    return RuntimeError(f"the simulator broke an invariant with {setting}; please report it with the trace")


def _check(setting: Setting, page: int) -> None:
    if setting.capacity < page:
        raise ValueError(f"the capacity of {setting.capacity} tokens is less than one page of {page}")
    if setting.sessions < 1:
        raise ValueError(f"at least one session must run at once, got {setting.sessions}")
    if min(setting.prefill_speed, setting.decode_speed, setting.restore_speed) <= 0:
        raise ValueError("prefill, decode and restore speed must be above 0 tokens per second")
    if setting.think_cap < 0 or math.isnan(setting.think_cap):
        raise ValueError(f"the cap on think times must be 0 or more seconds, got {setting.think_cap}")
    if setting.spare_pages < 0:
        raise ValueError(f"spare pages must be 0 or more, got {setting.spare_pages}")
    if setting.host_capacity < 0:
        raise ValueError(f"the host capacity must be 0 or more tokens, got {setting.host_capacity}")


def session_order(workload: Workload, seed: int | None) -> npt.NDArray[np.int32]:
    """Sessions in order of arrival, a permutation; None keeps the trace's order."""
    count = len(workload.sessions)
    order = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
    return order.astype(np.int32)


# What outcomes say of the future, for as long as they live: the points of a grid mostly ask for the same.
_futures: WeakKeyDictionary[Outcome, tuple[Workload, tuple[float, ...], Future]] = WeakKeyDictionary()

_sequences: WeakKeyDictionary[Future, dict[int | None, Sequence | None]] = WeakKeyDictionary()  # by order's seed


def _future(workload: Workload, setting: Setting, needed: bool, reference: Outcome | None) -> Future:
    if not needed:
        return UNKNOWN
    if reference is None:
        reference = simulate(workload, unbounded(setting))
    # The larger ones are rejected: their number says which.
    page = workload.page_size
    all_fit = -(-workload.largest_request // page) <= setting.capacity // page
    fitting = len(workload.requests) if all_fit else int(fits(workload, setting.capacity).sum())
    question = (fitting, setting.think_cap, setting.decode_speed)
    asked, before, future = _futures.get(reference, (None, None, UNKNOWN))
    if asked is not workload or before != question:
        future = known_future(
            workload,
            reference.fates,
            capacity=setting.capacity,
            think_cap=setting.think_cap,
            decode_speed=setting.decode_speed,
        )
        _futures[reference] = (workload, question, future)
    return future


def unbounded(setting: Setting) -> Setting:
    """The same sessions with a cache that never evicts: its rate is the most that any policy can reach."""
    return replace(setting, policy="lru", capacity=UNBOUNDED, host_capacity=0, admission="none")


def new_cache(
    workload: Workload,
    capacity: int,
    policy: EvictionPolicy,
    setting: Setting,
    future: Future,
    *,
    refills: int | None = None,
) -> Cache:
    """An empty cache of ``capacity`` tokens for the workload; ``refills``: how often a node may be refilled."""
    used = len(workload.nodes)
    # Refilling a truncated node splits it: at most once when a request starts and once when it ends.
    usual = 2 * len(workload.requests) if setting.truncate else 0
    room = used + (usual if refills is None else refills) + 1
    nodes = np.zeros(room, dtype=NODE)
    mine = nodes[:used]
    for name in ("parent", "start", "length", "level"):
        mine[name] = workload.nodes[name]
    mine["owner"] = mine["first"] = mine["used_by"] = mine["joined"] = NONE
    nodes[ROOT]["resident"] = nodes[ROOT]["length"]
    cache = Cache(workload, nodes, policy, future)
    cache.record["capacity"] = capacity // workload.page_size
    cache.record["node_count"] = used
    cache.record["truncate"] = setting.truncate
    cache.record["insert_output"] = setting.insert_output
    return cache


def _loop(workload: Workload, setting: Setting) -> Loop:
    loop = Loop(workload, setting.sessions, session_order(workload, setting.order_seed))
    policy = admission_policy(setting.admission)
    if not _admits_all(policy):
        start, go_on = compiled_admission(policy)
        loop.call("admit", start)
        loop.call("go_on", go_on)
    values = {
        "admits_all": _admits_all(policy),
        "service": setting.service,
        "write_through": setting.write_through and setting.host_capacity > 0,
        "think_cap": setting.think_cap,
        "prefill": setting.prefill_speed,
        "decode": setting.decode_speed,
        "restore": setting.restore_speed,
    }
    for name, value in values.items():
        loop.record[name] = value
    return loop


def _admits_all(policy: AdmissionPolicy) -> bool:
    return policy.start is always and policy.go_on is always
