"""What a request does to the cache when it starts and when it ends."""

from __future__ import annotations

from radix_cache.gaps import LEAD_CLASSES, LEADS, REFRESH, SHARED_GAPS
from radix_cache.gaps import count_gap as _count_gap
from radix_cache.gaps import gap_row as _gap_row
from radix_cache.gaps import new_pace as _new_pace
from radix_cache.gaps import rank_gaps as _rank_gaps
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import DONE, NONE, REJECTED, ROOT, RUNNING, Cache
from radix_cache.simulator.order import age_bin, discard
from radix_cache.simulator.tree import (
    cut,
    evict,
    host_match,
    insert,
    match,
    offer,
    pinned_pages,
    reoffer,
    supersede,
    touch,
)

count_gap = core(_count_gap)
rank_gaps = core(_rank_gaps)
gap_row = core(_gap_row)
new_pace = core(_new_pace)


@core
def observe(c: Cache, row: int, gap: float) -> None:
    """Learn one gap; see ``radix_cache.gaps.GapTable.observe``, which this mirrors."""
    s = c.state[0]
    if s.learned == NONE and s.host_learned == NONE:
        return
    count_gap(c.counts, row, age_bin(gap, c.order.edges))
    c.fresh[row] += 1
    if c.fresh[row] < REFRESH:
        return
    c.fresh[row] = 0
    s.rebuilds += 1
    if s.learned != NONE:
        first = s.learned + row * LEAD_CLASSES
        rank_gaps(c.counts[row], c.order.edges, LEADS, c.order.ranks[first : first + LEAD_CLASSES])
    if s.host_learned != NONE:
        first = s.host_learned + row * LEAD_CLASSES
        rank_gaps(c.counts[row], c.order.edges, LEADS, c.host.ranks[first : first + LEAD_CLASSES])


@core
def arrive(c: Cache, request: int, previous: int) -> None:
    """A flow's next request is there: its gap is known."""
    if previous != NONE:
        f = c.flows[c.requests[request].flow]
        gap = c.clock[0].now - f.last_done
        observe(c, gap_row(f.stop, f.pace), gap)
        f.pace = new_pace(f.pace, age_bin(gap, c.order.edges))


@core
def note_shared_use(c: Cache, request: int) -> None:
    """Learn the gap between uses of the deepest head that this and another flow have in the cache."""
    s = c.state[0]
    if s.learned == NONE and s.host_learned == NONE:
        return
    r = c.requests[request]
    now = c.clock[0].now
    node = r.head
    found = False
    while node != ROOT:
        n = c.nodes[node]
        if n.resident > 0:
            if not found and (n.shared != 0 or n.first != r.flow):
                found = True
                observe(c, SHARED_GAPS, now - n.seen)
            n.seen = now
        node = n.parent


@core
def start(c: Cache, request: int) -> bool:
    """Begin a request: match, make room, insert the prompt, hold pages for the answer.

    False when it must wait until running requests free memory; nothing has changed then. A request larger than
    the cache is rejected: it hits nothing and leaves nothing.
    """
    s = c.state[0]
    r = c.requests[request]
    fate = c.fates[request]
    total = (r.prompt + r.output + s.page - 1) // s.page
    c.clock[0].stamp += 1
    fate.start_stamp = c.clock[0].stamp
    fate.start = c.clock[0].now
    if total > s.capacity:
        fate.status = REJECTED
        return True
    frontier = match(c, r.cap)
    f = c.nodes[frontier]
    hit = f.start + f.resident
    need = total - hit
    # Cheap and sufficient first. A prompt that is cached to its last token holds one page twice: it is computed
    # again because its logits are needed.
    if s.promised + total + 1 > s.capacity:
        held = pinned_pages(c, frontier)
        if s.reserved + held + need > s.capacity:
            return False
    flow = c.flows[r.flow]
    flow.context = r.prompt + r.output
    flow.newest = request
    fate.status = RUNNING
    note_shared_use(c, request)
    if flow.last_end != NONE:
        supersede(c, flow.last_end, r.end)
    discard(c.order, frontier)
    f.pins += 1
    cut(c, frontier)  # a server splits the node when it matches: only then does it evict
    s.cause = request
    if not evict(c, need - (s.capacity - s.used - s.reserved)):
        s.broken = 1
    # Evicted pages may have gone to the host, and the host may have dropped some: match there only now.
    host = 0
    if s.host_capacity > 0:
        host = host_match(c, r.cap, frontier)
    if hit > 0:
        f.hits += 1.0
    f.pins -= 1
    inserted = insert(c, r.end, r.flow, request)
    end = c.nodes[r.end]
    discard(c.order, r.end)
    end.pins += 1
    flow.last_end = r.end
    fate.hit = hit * s.page
    fate.host = host * s.page
    fate.reserve = total - hit - inserted
    fate.total = end.start + end.length + fate.reserve
    fate.place = s.running
    s.reserved += fate.reserve
    s.promised += fate.total
    c.running[s.running] = request
    s.running += 1
    return True


@core
def finish(c: Cache, request: int) -> None:
    """End a request: insert its answer's pages, release the rest, unpin."""
    s = c.state[0]
    r = c.requests[request]
    fate = c.fates[request]
    flow = c.flows[r.flow]
    c.clock[0].stamp += 1
    fate.done_stamp = c.clock[0].stamp
    fate.done = c.clock[0].now
    flow.stop = r.stop
    flow.last_done = c.clock[0].now
    if fate.status == REJECTED:
        return
    s.running -= 1
    last = c.running[s.running]
    c.running[fate.place] = last
    c.fates[last].place = fate.place
    s.promised -= fate.total
    s.reserved -= fate.reserve
    end = r.end
    if s.insert_output != 0:
        end = r.kv
        insert(c, end, r.flow, request)
    else:
        touch(c, end, r.flow, request)
    c.nodes[r.end].pins -= 1
    flow.last_end = end
    discard(c.order, end)
    offer(c, end)
    if end != r.end:
        discard(c.order, r.end)
        offer(c, r.end)
    fate.status = DONE


@core
def set_state(c: Cache, flow: int, state: int) -> None:
    """A flow ended, was parked or goes on: its newest sequence is scored again."""
    f = c.flows[flow]
    f.state = state
    node = f.last_end
    if node == NONE:
        return
    while c.nodes[node].resident == 0:
        reoffer(c, node)
        node = c.nodes[node].parent
    reoffer(c, node)
