"""One request at a time: what the general core comes to when nothing overlaps, at a fraction of its cost.

One client plays sessions of one request each, which is how open-loop traces of flat prompts are compared with other
simulators. Then time follows from the requests alone, and a leaf's rank is a small integer of its own: on a request's
path only one node can be a leaf, so no two leaves have the same last user, nor the same next one. ``lru`` takes
the least last user, ``belady`` a leaf without a next user, the longest unused first, else the one with the last next
user. Either is the greatest bit of a bitset, where the general core keeps heaps of scored leaves.

``tests/test_simulator_sequential.py`` holds every figure of an outcome to the general core's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.simulator.bitset import add, greatest, new_bitset, remove
from radix_cache.simulator.jit import inlined, jit
from radix_cache.simulator.layout import DONE, FATE, NONE, REJECTED, ROOT, Records
from radix_cache.simulator.uses import Future
from radix_cache.simulator.workload import Workload

# As ``layout.NODE``, with what is asked here; two to a cache line.
_NODE = np.dtype(
    [
        ("parent", "i4"),
        ("start", "i4"),
        ("length", "i4"),
        ("level", "i4"),
        ("resident", "i4"),
        ("kids", "i4"),
        ("last", "i4"),  # position of its last user in the order of requests
        ("place", "i4"),  # in the victim order; NONE: not in it
    ]
)

_STATE = np.dtype(
    [
        # Of the run.
        ("page", "i8"),  # tokens
        ("capacity", "i8"),  # pages
        ("insert_output", "i8"),
        ("service", "i8"),
        ("think_cap", "f8"),
        ("prefill", "f8"),
        ("decode", "f8"),
        # Of the cache.
        ("nodes", "i8"),  # in use
        ("used", "i8"),  # pages
        ("hit", "i8"),  # pages
        ("rejected", "i8"),
        ("evicted", "i8"),  # pages
        ("evictions", "i8"),
        ("area", "f8"),  # as in ``loop.LOOP``
        ("busy", "f8"),
        ("now", "f8"),
        ("broken", "i8"),
    ]
)


class Played(NamedTuple):
    """What came of it."""

    fates: Records
    hit_tokens: int
    rejected: int
    seconds: float  # until the last answer
    evicted: int  # pages
    evictions: int
    area: float  # integral of the live context over the time that the client was busy, token seconds
    busy: float  # that time, in seconds
    broken: bool


class _Order(NamedTuple):
    """Victim order: places are 0 .. 2n - 1 for n requests, the greatest goes first."""

    words: npt.NDArray[np.int64]
    marks: npt.NDArray[np.int64]
    leaf_at: npt.NDArray[np.int32]  # place -> node
    uses: npt.NDArray[np.int32]  # as in ``Sequence``
    first_use: npt.NDArray[np.int64]


def is_sequence(workload: Workload) -> bool:
    """Whether every session is one request."""
    return len(workload.requests) == len(workload.flows) == len(workload.sessions)


class Sequence(NamedTuple):
    """An order of requests, and who of them uses a node next, as in ``Future`` but by position in that order."""

    order: npt.NDArray[np.int32]
    uses: npt.NDArray[np.int32]
    first_use: npt.NDArray[np.int64]  # by position; empty: the future is not asked


def sequence_of(future: Future, order: npt.NDArray[np.int32]) -> Sequence | None:
    """None where two requests are expected at the same time: their order then does not say all of the future."""
    if not len(future.plans):
        return Sequence(order, future.next_use, future.plans["next_use"])
    if not (np.diff(future.plans["expected"][order]) > 0).all():
        return None
    position = np.full(len(order) + 1, NONE, dtype=np.int32)  # the last one stands for no request
    position[order] = np.arange(len(order), dtype=np.int32)
    return Sequence(order, position[future.next_use], future.plans["next_use"][order])


def play(
    workload: Workload,
    sequence: Sequence,
    *,
    capacity: int,
    insert_output: bool,
    service: int,
    think_cap: float,
    prefill: float,
    decode: float,
) -> Played:
    """Play a workload of sessions of one request, one after the other.

    Args:
        workload: one for which ``is_sequence`` holds.
        sequence: the order of its sessions; ``belady`` is played where it knows the future, else ``lru``.
        capacity: tokens. The others are those of ``run.Setting``.
    """
    order = sequence.order
    count = len(order)
    trie = workload.nodes
    nodes = np.empty(len(trie) + 2 * count + 1, dtype=_NODE)
    state: Any = np.zeros(1, dtype=_STATE)
    values = {
        "page": workload.page_size,
        "capacity": capacity // workload.page_size,
        "insert_output": insert_output,
        "service": service,
        "think_cap": think_cap,
        "prefill": prefill,
        "decode": decode,
        "nodes": len(trie),
    }
    for name, value in values.items():
        state[name] = value
    leaf_at = np.empty(2 * count, dtype=np.int32)
    victims = _Order(*new_bitset(2 * count), leaf_at, sequence.uses, sequence.first_use)
    fates = np.empty(count, dtype=FATE)
    _play(state, trie, nodes, workload.requests, order, victims, fates)
    s = state[0]
    return Played(
        fates,
        int(s["hit"]) * workload.page_size,
        int(s["rejected"]),
        float(s["now"]),
        int(s["evicted"]),
        int(s["evictions"]),
        s["area"],
        s["busy"],
        bool(s["broken"]),
    )


@inlined
def _match(nodes: Any, node: int) -> int:
    while nodes[node].resident == 0:
        node = nodes[node].parent
    return int(node)


@inlined
def _place(nodes: Any, order: Any, node: int) -> int:
    """Where a leaf belongs in the victim order."""
    n = nodes[node]
    if len(order.first_use) > 0:
        user = order.uses[order.first_use[n.last] + n.level]
        if user != NONE:
            return int(user)
    return int(len(order.leaf_at) - 1 - n.last)


@inlined
def _put(nodes: Any, order: Any, node: int, place: int) -> None:
    nodes[node].place = place
    order.leaf_at[place] = node


@inlined
def _discard(nodes: Any, order: Any, node: int) -> None:
    n = nodes[node]
    if n.place != NONE:
        remove(order.words, order.marks, n.place)
        n.place = NONE


@inlined
def _offer(nodes: Any, order: Any, node: int) -> None:
    """Put a node into the victim order if it may be evicted."""
    _discard(nodes, order, node)
    n = nodes[node]
    if node != ROOT and n.kids == 0 and n.resident > 0:
        _put(nodes, order, node, _place(nodes, order, node))
        add(order.words, order.marks, n.place)


@inlined
def _evict(s: Any, nodes: Any, order: Any, pages: int, pinned: int) -> None:
    """Free ``pages`` from the ends of victims; all but ``pinned`` may go."""
    target = s.used - pages
    while s.used > target:
        place = greatest(order.words, order.marks)
        if place == NONE:
            s.broken = 1
            return
        victim = order.leaf_at[place]
        n = nodes[victim]
        going = min(n.resident, s.used - target)
        n.resident -= going
        s.used -= going
        s.evicted += going
        s.evictions += 1
        if n.resident > 0:
            return
        n.place = NONE
        parent = n.parent
        above = nodes[parent]
        above.kids -= 1
        above.last = max(above.last, n.last)
        offered = parent != ROOT and parent != pinned and above.kids == 0
        to = _place(nodes, order, parent) if offered else NONE
        # Mostly the parent goes next: what is left of a conversation was used no later than its tail.
        if to != place:
            remove(order.words, order.marks, place)
        if offered:
            _put(nodes, order, parent, to)
            if to != place:
                add(order.words, order.marks, to)


@inlined
def _insert(s: Any, nodes: Any, order: Any, end: int, at: int) -> int:
    """Make the path to ``end`` resident and note its user; the number of pages that were missing."""
    frontier = _match(nodes, end)
    f = nodes[frontier]
    if frontier != ROOT:
        _discard(nodes, order, frontier)
        if f.resident < f.length:
            # What is left of a truncated node is a node of its own, as in ``tree.split``.
            head = s.nodes
            s.nodes += 1
            h = nodes[head]
            h.parent, h.start, h.length, h.level = f.parent, f.start, f.resident, f.level
            h.resident, h.kids, h.last, h.place = f.resident, 0, f.last, NONE
            f.parent = head
            f.start += f.resident
            f.length -= f.resident
            f.resident = 0
            frontier = head
    inserted = 0
    node = end
    while node != frontier:
        n = nodes[node]
        n.resident = n.length
        n.last = at
        inserted += n.length
        nodes[n.parent].kids += 1
        node = n.parent
    s.used += inserted
    nodes[end].last = at
    return inserted


@inlined
def _run(s: Any, nodes: Any, order: Any, r: Any, fate: Any, at: int) -> None:
    """A request's effect on the cache, from its match to the insertion of its answer."""
    total = (r.prompt + r.output + s.page - 1) // s.page
    fate.host = fate.place = 0
    if total > s.capacity:
        s.rejected += 1
        fate.status = REJECTED
        fate.hit = fate.reserve = fate.total = 0
        return
    frontier = _match(nodes, r.cap)
    hit = nodes[frontier].start + nodes[frontier].resident
    _discard(nodes, order, frontier)
    _evict(s, nodes, order, total - hit - (s.capacity - s.used), frontier)
    inserted = _insert(s, nodes, order, r.end, at)
    s.hit += hit
    fate.status = DONE
    fate.hit = hit * s.page
    fate.reserve = total - hit - inserted
    fate.total = nodes[r.end].start + nodes[r.end].length + fate.reserve
    if s.insert_output != 0 and r.kv != r.end:
        _insert(s, nodes, order, r.kv, at)
        _offer(nodes, order, r.kv)
    _offer(nodes, order, r.end)


@jit
def _play(states: Any, trie: Any, nodes: Any, requests: Any, order: Any, victims: Any, fates: Any) -> None:
    s = states[0]
    for i in range(len(trie)):
        t, n = trie[i], nodes[i]
        n.parent, n.start, n.length, n.level = t.parent, t.start, t.length, t.level
        n.resident, n.kids, n.last, n.place = i == ROOT, 0, NONE, NONE
    now = 0.0
    count = len(order)
    for at in range(count):
        session = order[at]
        r = requests[session]
        fate = fates[session]
        # The end of a run, when the client finds no session left, says nothing of the load before.
        counts = at + 1 < count or count == 1
        ready = now + min(r.think, s.think_cap)
        if counts:
            s.area += r.prompt * (ready - now)
            s.busy += ready - now
        now = ready
        fate.ready = fate.start = now
        fate.ready_stamp, fate.start_stamp, fate.done_stamp = 3 * at + 1, 3 * at + 2, 3 * at + 3
        _run(s, nodes, victims, r, fate, at)
        context = r.prompt + r.output
        if s.service == 0:
            fate.first_token = now
            fate.done = now + (r.output / s.decode if np.isnan(r.service) else r.service)
        else:
            fate.first_token = now + (r.prompt - fate.hit) / s.prefill
            fate.done = fate.first_token + r.output / s.decode
            if s.service == 2 and counts:  # the end of a queued prefill is an event of its own
                s.area += context * (fate.first_token - now)
                s.busy += fate.first_token - now
                now = fate.first_token
        if counts:
            s.area += context * (fate.done - now)
            s.busy += fate.done - now
        now = fate.done
    s.now = now
