"""What one step of a server's scheduler does to the cache: SGLang 0.5.23's way, allocation by allocation.

``serve`` takes a request's memory whole when it starts and gives it back when it ends. A server takes it chunk by
chunk and token by token, keeps in the tree what it has computed so far, and frees a page more than a step can need.
With one request at a time the two are the same; with several they are not, and a recorded run is played with these.

A request holds pages in two places: those of the tree that its lock protects (``kept``), and those beside it
(``own``). ``CACHE.reserved`` is the sum of the latter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import DONE, NONE, ROOT, RUNNING, device, fate_at, flow_at, node_at, request_at
from radix_cache.simulator.memory import record_at
from radix_cache.simulator.order import discard
from radix_cache.simulator.serve import note_shared_use
from radix_cache.simulator.tree import cut, enter, insert, match, note_user, rejoin, split, supersede, touch, use_now
from radix_cache.simulator.victims import evict, offer, reoffer

# What a request holds, by request.
HOLD = np.dtype(
    [
        ("matched", "i4"),  # node that the last match ended at
        ("hit", "i4"),  # pages of that match
        ("lock", "i4"),  # node whose path is locked for it; NONE: it does not run
        ("kept", "i4"),  # pages of that path
        ("own", "i4"),  # pages beside the tree
        ("length", "i4"),  # tokens that have memory
        ("counted", "i4"),  # pages of the tree that it already counted as used
        ("looks", "i4"),  # times it was matched
        ("starts", "i4"),  # times its prefill began
    ],
    align=True,
)


@core
def hold_at(address: int, index: int) -> Any:
    return record_at(address, index, HOLD)


@core
def part(c: Any, holds: int, node: int, pages: int) -> int:
    """Split a node after its first ``pages`` resident pages; who locked no more than these has the head locked."""
    head = split(c, node, pages)
    n, h = node_at(c, node), node_at(c, head)
    discard(device(c), node)
    left = n.pins
    request = 0
    while left > 0:
        hold = hold_at(holds, request)
        if hold.lock == node:
            left -= 1
            if hold.kept <= n.start:
                hold.lock = head
                n.pins -= 1
                h.pins += 1
        request += 1
    offer(c, node)
    return head


@core
def newest_end(c: Any, flow: int) -> int:
    """Node where a flow's newest sequence ends; NONE before its first. That node may have got a head since."""
    f = flow_at(c, flow)
    node = f.last_end
    while node > ROOT and node_at(c, node).start >= f.last_pages:
        node = node_at(c, node).parent
    return int(node)


@core
def look_up(c: Any, holds: int, request: int, pages: int) -> None:
    """Match a waiting request, of which at most ``pages`` may hit. What it finds was used now."""
    h = hold_at(holds, request)
    r = request_at(c, request)
    node = r.kv
    while node_at(c, node).resident == 0 or node_at(c, node).start >= pages:
        node = node_at(c, node).parent
    if node_at(c, node).start + node_at(c, node).resident > pages:
        node = part(c, holds, node, pages - node_at(c, node).start)
    n = node_at(c, node)
    h.matched = node
    h.hit = n.start + n.resident
    if node != ROOT:
        use_now(c, node)
        cut(c, node)
        reoffer(c, node)
    if h.looks == 0:
        note_shared_use(c, request)
        last = newest_end(c, r.flow)
        if last != NONE:
            supersede(c, last, r.end)
    h.looks += 1


@core
def lock(c: Any, holds: int, request: int, node: int) -> None:
    """Lock a path for a request, instead of the one that is."""
    h = hold_at(holds, request)
    node_at(c, node).pins += 1
    discard(device(c), node)
    unlock(c, holds, request)
    h.lock = node


@core
def unlock(c: Any, holds: int, request: int) -> None:
    h = hold_at(holds, request)
    if h.lock == NONE:
        return
    node_at(c, h.lock).pins -= 1
    discard(device(c), h.lock)
    offer(c, h.lock)
    h.lock = NONE


@core
def want_prefill(c: Any, holds: int, request: int, until: int) -> int:
    """Lock what a request matched when it begins. Returns the tokens that its chunk up to ``until`` may take."""
    h = hold_at(holds, request)
    if h.lock == NONE:
        lock(c, holds, request, h.matched)
        h.kept = h.hit
        h.length = h.hit * c.page
        fate = fate_at(c, request)
        fate.status = RUNNING
        if h.starts == 0:
            fate.hit = h.length
            fate.start = c.now
        h.starts += 1
    return int(max(until - h.length, 0) + c.page)


@core
def make_room(c: Any, request: int, tokens: int) -> bool:
    """Evict until ``tokens`` are free, or all that may go is gone: false then."""
    c.cause = request
    return bool(evict(c, (tokens + c.page - 1) // c.page - (c.capacity - c.used - c.reserved)))


@core
def take(c: Any, holds: int, request: int, until: int) -> None:
    """Take the memory of a request's tokens up to ``until``; 0: of one token more."""
    h = hold_at(holds, request)
    until = max(until, h.length) if until > 0 else h.length + 1
    pages = (until + c.page - 1) // c.page - (h.length + c.page - 1) // c.page
    h.own += pages
    c.reserved += pages
    h.length = until


@core
def insert_pages(c: Any, holds: int, end: int, pages: int, flow: int, request: int) -> int:
    """As ``insert``, but only the first ``pages`` of the path to ``end``. Returns the node they end in."""
    node = end
    while node != ROOT and node_at(c, node).start >= pages:
        node = node_at(c, node).parent
    if node == ROOT:
        return ROOT
    n = node_at(c, node)
    known = match(c, node)
    k = node_at(c, known)
    if known == node and k.start + k.resident >= pages:
        if k.start + k.resident > pages:
            node = part(c, holds, node, pages - k.start)
        touch(c, node, flow, request)
        note_user(c, node, flow)
        cut(c, node)
        return node
    if known != ROOT and k.resident < k.length:
        # It holds what an earlier chunk, or an eviction, left.
        part(c, holds, known, k.resident)
    if n.start + n.length == pages:
        insert(c, node, flow, request)
        return node
    above = node_at(c, n.parent)
    new = n.parent != ROOT and above.resident == 0
    insert(c, n.parent, flow, request)
    discard(device(c), n.parent)
    cut(c, n.parent)
    if new:  # both came at once: they are one radix node
        above.joined = node
    enter(c, node, pages - n.start, NONE, flow, request)
    return node


@core
def count_hits(c: Any, end: int, known: int, counted: int) -> None:
    """Pages up to ``known`` were in the tree when a request inserted the path to ``end``, which uses them once more.

    Not those up to ``counted``, which the request counted when it inserted them. A node has the hits of what is below
    it, so one is taken from where these end.
    """
    node = end
    while node != ROOT and node_at(c, node).start >= known:
        node = node_at(c, node).parent
    if known <= counted:
        return
    node_at(c, node).hits += 1.0
    while node != ROOT and node_at(c, node).start >= counted:
        node = node_at(c, node).parent
    if node != ROOT:
        node_at(c, node).hits -= 1.0


@core
def keep(c: Any, holds: int, request: int, tokens: int) -> None:
    """Give the tree what a request has computed of its first ``tokens``; its lock moves there."""
    h = hold_at(holds, request)
    r = request_at(c, request)
    whole = node_at(c, r.kv)
    pages = min(tokens // c.page, whole.start + whole.length if r.kv != ROOT else 0)
    last = newest_end(c, r.flow)
    k = node_at(c, match(c, r.kv))
    known = min(k.start + k.resident, pages)
    end = insert_pages(c, holds, r.kv, pages, r.flow, request)
    count_hits(c, end, known, h.counted)
    if r.prompt // c.page < pages:
        cut(c, r.end)  # an answer is a node of its own
    h.counted = max(h.counted, pages)
    # What another request had put there meanwhile is held twice until now.
    c.reserved -= pages - h.kept
    h.own -= pages - h.kept
    h.kept = pages
    lock(c, holds, request, end)
    flow = flow_at(c, r.flow)
    if last != NONE:
        supersede(c, last, end)
    rejoin(c, end, ROOT)
    flow.last_end = end
    flow.last_pages = pages


@core
def give_back(c: Any, holds: int, request: int) -> None:
    """A request gives back what it holds; what the tree has of it stays as long as nobody needs the room."""
    h = hold_at(holds, request)
    c.reserved -= h.own
    h.own = 0
    h.kept = 0
    h.length = 0
    h.counted = 0
    unlock(c, holds, request)


@core
def end_request(c: Any, holds: int, request: int, tokens: int) -> None:
    """A request has its answer: the first ``tokens`` of both stay in the tree."""
    r = request_at(c, request)
    flow = flow_at(c, r.flow)
    flow.stop = r.stop
    flow.last_done = c.now
    flow.context = r.prompt + r.output
    fate_at(c, request).status = DONE
    fate_at(c, request).done = c.now
    keep(c, holds, request, tokens)
    give_back(c, holds, request)
