"""What a request does to the cache when it starts and when it ends."""

from __future__ import annotations

from typing import Any

from radix_cache.gaps import AGE_BINS, GAP_ROWS, LEAD_CLASSES, LEADS, REFRESH, SHARED_GAPS
from radix_cache.gaps import count_gap as _count_gap
from radix_cache.gaps import gap_row as _gap_row
from radix_cache.gaps import new_pace as _new_pace
from radix_cache.gaps import rank_gaps as _rank_gaps
from radix_cache.simulator.host_tier import host_match
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import (
    DONE,
    NONE,
    ORDER,
    REJECTED,
    ROOT,
    RUNNING,
    device,
    fate_at,
    flow_at,
    host,
    node_at,
    request_at,
)
from radix_cache.simulator.memory import INDEX, floats_at, record_at
from radix_cache.simulator.order import age_bin, discard
from radix_cache.simulator.tree import cut, insert, match, pinned_pages, rejoin, supersede, touch
from radix_cache.simulator.victims import evict, offer, reoffer

count_gap = core(_count_gap)
rank_gaps = core(_rank_gaps)
gap_row = core(_gap_row)
new_pace = core(_new_pace)


@core
def learns(c: Any) -> bool:
    return bool(device(c).learned != NONE or host(c).learned != NONE)


@core
def observe(c: Any, row: int, gap: float) -> None:
    """Learn one gap; see ``radix_cache.gaps.GapTable.observe``, which this mirrors."""
    if not learns(c):
        return
    edges = floats_at(device(c).edges, 1, AGE_BINS + 1)[0]
    counts = floats_at(c.counts, GAP_ROWS, AGE_BINS)
    count_gap(counts, row, age_bin(gap, edges))
    fresh = record_at(c.fresh, row, INDEX)
    fresh.value += 1
    if fresh.value < REFRESH:
        return
    fresh.value = 0
    c.rebuilds += 1
    for tier in range(2):
        o = record_at(c.order, tier, ORDER)
        if o.learned != NONE:
            first = o.learned + row * LEAD_CLASSES
            rank_gaps(counts[row], edges, LEADS, floats_at(o.ranks, o.groups, o.bins)[first : first + LEAD_CLASSES])


@core
def arrive(c: Any, request: int, previous: int) -> None:
    """A flow's next request is there: its gap is known."""
    if previous != NONE:
        f = flow_at(c, request_at(c, request).flow)
        gap = c.now - f.last_done
        observe(c, gap_row(f.stop, f.pace), gap)
        f.pace = new_pace(f.pace, age_bin(gap, floats_at(device(c).edges, 1, AGE_BINS + 1)[0]))


@core
def note_shared_use(c: Any, request: int) -> None:
    """Learn the gap between uses of the deepest head that this and another flow have in the cache."""
    if not learns(c):
        return
    r = request_at(c, request)
    now = c.now
    node = r.head
    found = False
    while node != ROOT:
        n = node_at(c, node)
        if n.resident > 0:
            if not found and (n.shared != 0 or n.first != r.flow):
                found = True
                observe(c, SHARED_GAPS, now - n.seen)
            n.seen = now
        node = n.parent


@core
def start(c: Any, request: int) -> bool:
    """Begin a request: match, make room, insert the prompt, hold pages for the answer and the spare ones.

    False when it must wait until running requests free memory; nothing has changed then. A request larger than
    the cache is rejected: it hits nothing and leaves nothing.
    """
    r = request_at(c, request)
    fate = fate_at(c, request)
    total = (r.prompt + r.output + c.page - 1) // c.page
    c.stamp += 1
    fate.start_stamp = c.stamp
    fate.start = c.now
    if total > c.capacity:
        fate.status = REJECTED
        return True
    frontier = match(c, r.cap)
    f = node_at(c, frontier)
    hit = f.start + f.resident
    need = total - hit
    # Cheap and sufficient first. A prompt that is cached to its last token holds one page twice: it is computed
    # again because its logits are needed.
    spare = c.spare
    if c.promised + total + spare + 1 > c.capacity:
        room = c.capacity - c.reserved - pinned_pages(c, frontier) - need
        if room < 0:
            return False
        spare = min(spare, room)
    total += spare
    need += spare
    flow = flow_at(c, r.flow)
    flow.context = r.prompt + r.output
    flow.newest = request
    fate.status = RUNNING
    note_shared_use(c, request)
    if flow.last_end != NONE:
        supersede(c, flow.last_end, r.end)
    discard(device(c), frontier)
    f.pins += 1
    # Before anything is evicted: what hangs below the match must not take it along as one radix node.
    cut(c, frontier)
    c.cause = request
    if not evict(c, need - (c.capacity - c.used - c.reserved)):
        c.broken = 1
    # Evicted pages may have gone to the host, and the host may have dropped some: match there only now.
    from_host = 0
    if c.host_capacity > 0:
        from_host = host_match(c, r.cap, frontier)
    if hit > 0:
        f.hits += 1.0
    f.pins -= 1
    inserted = insert(c, r.end, r.flow, request)
    end = node_at(c, r.end)
    discard(device(c), r.end)
    end.pins += 1
    flow.last_end = r.end
    fate.hit = hit * c.page
    fate.host = from_host * c.page
    fate.reserve = total - hit - inserted
    fate.total = end.start + end.length + fate.reserve
    fate.place = c.running_count
    c.reserved += fate.reserve
    c.promised += fate.total
    record_at(c.running, c.running_count, INDEX).value = request
    c.running_count += 1
    return True


@core
def finish(c: Any, request: int) -> None:
    """End a request: insert its answer's pages, release the rest, unpin."""
    r = request_at(c, request)
    fate = fate_at(c, request)
    flow = flow_at(c, r.flow)
    c.stamp += 1
    fate.done_stamp = c.stamp
    fate.done = c.now
    flow.stop = r.stop
    flow.last_done = c.now
    if fate.status == REJECTED:
        return
    c.running_count -= 1
    last = record_at(c.running, c.running_count, INDEX).value
    record_at(c.running, fate.place, INDEX).value = last
    fate_at(c, last).place = fate.place
    c.promised -= fate.total
    c.reserved -= fate.reserve
    end = r.end
    if c.insert_output != 0:
        end = r.kv
        insert(c, end, r.flow, request)
        rejoin(c, end, r.end)
    else:
        touch(c, end, r.flow, request)
    node_at(c, r.end).pins -= 1
    flow.last_end = end
    discard(device(c), end)
    offer(c, end)
    if end != r.end:
        discard(device(c), r.end)
        offer(c, r.end)
    fate.status = DONE


@core
def set_state(c: Any, flow: int, state: int) -> None:
    """A flow ended, was parked or goes on: its newest sequence is scored again."""
    f = flow_at(c, flow)
    f.state = state
    node = f.last_end
    if node == NONE:
        return
    while node_at(c, node).resident == 0:
        reoffer(c, node)
        node = node_at(c, node).parent
    reoffer(c, node)
