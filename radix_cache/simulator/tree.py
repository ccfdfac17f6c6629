"""The radix tree of one cache: match, insert, evict. All walks go from a node towards the root.

The workload's prompts form a static trie whose nodes are runs of pages (``radix_cache.simulator.workload``). The
cache holds a prefix of it: a node is resident with its first ``resident`` pages, and only below full nodes. So

- the longest match of a prompt is the first resident node above its end: no walk from the root is needed;
- a node's last use and hits are those of the nodes below it too. They are written only where a prompt ends and
  handed to the parent when the child leaves, so they are exact for leaves, which is all that a policy looks at;
- a running request pins the node where its prompt ends: what has resident children is no candidate anyway.

A request costs what it changes, not what it reads: a hit of 2,000 pages costs the same as one of 10.
"""

from __future__ import annotations

from radix_cache.simulator.evictions import DEVICE, HOST, SPLIT, note
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, PENDING, ROOT, Cache, Order
from radix_cache.simulator.order import discard, grow_old, least, put_aged

INF = float("inf")


@core
def next_use(c: Cache, node: int) -> float:
    """When the next request that needs the node will start, if nothing waits; inf when there is none."""
    if len(c.expected) == 0:
        return INF
    n = c.nodes[node]
    request = n.used_by
    while request != NONE:
        request = c.next_use[c.next_offset[request] + n.level]
        if request != NONE and c.fates[request].status == PENDING:
            return due(c, request)
    return INF


@core
def due(c: Cache, request: int) -> float:
    """When a request of the future will start: reckoned from what its flow did last."""
    newest = c.flows[c.requests[request].flow].newest
    if newest == NONE:
        return float(c.expected[request])
    return float(c.fates[newest].start + c.elapsed[request] - c.elapsed[newest])


@core
def radix_length(c: Cache, node: int) -> int:
    """Pages of the server's radix node that ends here."""
    length = 0
    while True:
        length += c.nodes[node].resident
        parent = c.nodes[node].parent
        if node == ROOT or c.nodes[parent].joined != node:
            return int(length)
        node = parent


@core
def score(c: Cache, order: Order, node: int, depth: int, size: int) -> tuple[int, float]:
    """(group, key) of a node cut at ``depth`` pages, of which ``size`` would go."""
    n = c.nodes[node]
    page = c.state[0].page
    sharers = 2.0 if n.shared != 0 else 1.0
    known_next = next_use(c, node)
    now = c.clock[0].now
    stop, state, gone = float(n.stop), float(c.flows[n.owner].state), float(n.superseded)
    tokens, drop, context = float(depth * page), float(size * page), float(n.context)
    group = order.group(
        now, n.time, stop, n.pace, state, gone, sharers, tokens, drop, context, n.hits, n.inserted, known_next
    )
    key = order.key(
        now, n.time, stop, n.pace, state, gone, sharers, tokens, drop, context, n.hits, n.inserted, known_next
    )
    return group, key


@core
def offer(c: Cache, node: int) -> None:
    """Put a node into the device's victim order if it may be evicted."""
    n = c.nodes[node]
    if node == ROOT or n.kids > 0 or n.pins > 0 or n.resident == 0:
        return
    size = 1 if c.state[0].truncate != 0 else radix_length(c, node)
    group, key = score(c, c.order, node, n.start + n.resident, size)
    put_aged(c.order, node, group, key, n.stamp, c.clock[0].now - n.time)


@core
def reoffer(c: Cache, node: int) -> None:
    """Score a leaf again after its state changed."""
    if c.order.places[node].bucket != NONE:
        discard(c.order, node)
        offer(c, node)
    if c.nodes[node].host > 0 and c.host.places[node].bucket != NONE:
        discard(c.host, node)
        offer_host(c, node)


@core
def offer_host(c: Cache, node: int) -> None:
    n = c.nodes[node]
    if n.host == 0 or n.host_kids > 0:
        return
    group, key = score(c, c.host, node, n.start + n.resident + n.host, 1)
    put_aged(c.host, node, group, key, n.stamp, c.clock[0].now - n.time)


@core
def leave_host(c: Cache, node: int, pages: int) -> None:
    """Remove the last ``pages`` host pages of a node."""
    n = c.nodes[node]
    n.host -= pages
    c.state[0].host_used -= pages
    if n.host > 0:
        return
    discard(c.host, node)
    above = c.nodes[n.parent]
    above.host_kids -= 1
    if above.host_kids == 0 and above.host > 0:
        offer_host(c, n.parent)


@core
def worth_taking(c: Cache, order: Order, node: int, end: int, wanted: int) -> int:
    """How many of the last ``wanted`` pages before ``end`` share the score of the last one."""
    group, key = score(c, order, node, end, 1)
    low, high = 1, wanted
    while low < high:
        middle = (low + high + 1) // 2
        g, k = score(c, order, node, end - middle + 1, 1)
        if g == group and k == key:
            low = middle
        else:
            high = middle - 1
    return low


@core
def shrink_host(c: Cache) -> None:
    """Bring the host tier back to its capacity."""
    s = c.state[0]
    if s.host_used > s.host_capacity:
        grow_old(c.host, c.clock[0].now)
    while s.host_used > s.host_capacity:
        victim = least(c.host)
        if victim == NONE:
            s.broken = 1
            return
        n = c.nodes[victim]
        pages = min(n.host, s.host_used - s.host_capacity)
        if s.host_uses_depth != 0:
            pages = worth_taking(c, c.host, victim, n.start + n.resident + n.host, pages)
        if len(c.log) > 0:
            note(c, HOST, victim, s.cause, n.start + n.resident + n.host, pages)
        leave_host(c, victim, pages)
        s.host_dropped += pages
        if n.host > 0 and s.host_uses_depth != 0:
            discard(c.host, victim)
            offer_host(c, victim)


@core
def drop(c: Cache, node: int, pages: int) -> None:
    """Remove the last ``pages`` resident pages of a leaf from the device, into the host tier where there is one."""
    s = c.state[0]
    n = c.nodes[node]
    if len(c.log) > 0:
        note(c, DEVICE, node, s.cause, n.start + n.resident, pages)
    n.resident -= pages
    s.used -= pages
    if n.superseded != 0:
        s.evicted_superseded += pages
    elif c.flows[n.owner].state == 2:
        s.evicted_ended += pages
    elif c.flows[n.owner].state == 1:
        s.evicted_parked += pages
    else:
        s.evicted_live += pages
    if s.host_capacity > 0:
        if n.host == 0:
            above = c.nodes[n.parent]
            above.host_kids += 1
            discard(c.host, n.parent)
        else:
            discard(c.host, node)
        n.host += pages
        s.host_used += pages
    if n.resident > 0:
        if s.uses_depth != 0:
            discard(c.order, node)
            offer(c, node)
    else:
        discard(c.order, node)
        n.joined = NONE
        hand_up(c, node)
    if s.host_capacity > 0:
        offer_host(c, node)
        shrink_host(c)


@core
def hand_up(c: Cache, node: int) -> None:
    """A node has left: its parent has one kid less and inherits its last use and hits."""
    n = c.nodes[node]
    above = c.nodes[n.parent]
    above.kids -= 1
    above.hits += n.hits
    n.hits = 0.0
    if n.stamp > above.stamp:
        above.stamp = n.stamp
        above.time = n.time
        above.owner = n.owner
        above.used_by = n.used_by
        above.context = n.context
        above.stop = n.stop
        above.pace = n.pace
    offer(c, n.parent)


@core
def evict(c: Cache, pages: int) -> bool:
    """Free at least ``pages``; exactly, where victims are truncated. False when too little is evictable."""
    s = c.state[0]
    if pages <= 0:
        return True
    grow_old(c.order, c.clock[0].now)
    target = s.used - pages
    while s.used > target:
        victim = least(c.order)
        if victim == NONE:
            return False
        s.evictions += 1
        if s.truncate != 0:
            n = c.nodes[victim]
            take = min(n.resident, s.used - target)
            if s.uses_depth != 0:
                take = worth_taking(c, c.order, victim, n.start + n.resident, take)
            drop(c, victim, take)
            continue
        while victim != NONE:
            parent = c.nodes[victim].parent
            whole = c.nodes[parent].joined == victim
            if whole:
                c.nodes[parent].joined = NONE
            drop(c, victim, c.nodes[victim].resident)
            victim = parent if whole else NONE
    return True


@core
def match(c: Cache, node: int) -> int:
    """Deepest resident node at or above ``node``."""
    while c.nodes[node].resident == 0:
        node = c.nodes[node].parent
    return int(node)


@core
def host_match(c: Cache, node: int, frontier: int) -> int:
    """Host pages on the path to ``node`` that follow the device's match."""
    run = 0
    while True:
        n = c.nodes[node]
        if node == frontier:
            return int(run + n.host if n.resident + n.host == n.length else n.host)
        run = run + n.host if n.host == n.length else n.host
        node = n.parent


@core
def cut(c: Cache, node: int) -> None:
    """A request parts here: the server's radix node ends at this one, and what was below is a node of its own."""
    below = c.nodes[node].joined
    c.nodes[node].joined = NONE
    if below == NONE or c.state[0].uses_depth == 0:
        return
    while c.nodes[below].joined != NONE:
        below = c.nodes[below].joined
    reoffer(c, below)


@core
def split_refilled(c: Cache, node: int) -> int:
    """Make the resident head of a truncated node a node of its own: its pages are older than those to come."""
    s = c.state[0]
    head = s.nodes
    s.nodes += 1
    n = c.nodes[node]
    h = c.nodes[head]
    h.parent, h.start, h.length, h.level = n.parent, n.start, n.resident, n.level
    h.resident, h.kids, h.pins, h.joined = n.resident, 0, 0, NONE
    h.owner, h.first, h.used_by = n.owner, n.first, n.used_by
    h.host, h.host_kids, h.mark = 0, 0, 0
    h.shared, h.superseded, h.hits = n.shared, n.superseded, n.hits
    h.inserted, h.time, h.stamp, h.seen = n.inserted, n.time, n.stamp, n.seen
    h.context, h.stop, h.pace = n.context, n.stop, n.pace
    above = c.nodes[n.parent]
    if above.joined == node:
        above.joined = head
    if len(c.log) > 0:
        note(c, SPLIT, node, head, h.start + h.length, 0)
    n.parent = head
    n.start += n.resident
    n.length -= n.resident
    n.resident = 0
    n.hits = 0.0
    return int(head)


@core
def touch(c: Cache, node: int, flow: int, request: int) -> None:
    """Record a use of a node; those above it inherit it."""
    n = c.nodes[node]
    n.time = c.clock[0].now
    n.stamp = c.clock[0].stamp
    n.owner = flow
    n.used_by = request
    n.context = c.flows[flow].context
    n.stop = c.flows[flow].stop
    n.pace = c.flows[flow].pace


@core
def note_user(c: Cache, node: int, flow: int) -> None:
    """Find out which nodes at and above ``node`` now have several users."""
    while node != ROOT and c.nodes[node].first != flow and c.nodes[node].shared == 0:
        c.nodes[node].shared = 1
        c.nodes[node].superseded = 0
        node = c.nodes[node].parent


@core
def insert(c: Cache, end: int, flow: int, request: int) -> int:
    """Make the path to ``end`` resident and record its use. Returns the number of pages inserted.

    There must be room, and the resident part must be safe from eviction.
    """
    s = c.state[0]
    now = c.clock[0].now
    frontier = match(c, end)
    if frontier != ROOT:
        f = c.nodes[frontier]
        discard(c.order, frontier)
        if f.host > 0:
            leave_host(c, frontier, f.host)
        if f.resident < f.length:
            frontier = split_refilled(c, frontier)
    cut(c, frontier)
    inserted = 0
    below = NONE
    node = end
    while node != frontier:
        n = c.nodes[node]
        if n.host > 0:
            leave_host(c, node, n.host)
        n.resident = n.length
        n.inserted = now
        n.seen = now
        touch(c, node, flow, request)
        n.hits = 0.0
        n.first = flow
        n.shared = 0
        n.superseded = 0
        n.joined = below
        inserted += n.length
        c.nodes[n.parent].kids += 1
        below = node
        node = n.parent
    s.used += inserted
    s.inserted += inserted
    cut(c, end)
    touch(c, end, flow, request)
    note_user(c, frontier, flow)
    return inserted


@core
def supersede(c: Cache, old: int, new: int) -> None:
    """A flow went from the path to ``old`` to the path to ``new``: what is only on the old one is abandoned."""
    while old != new:
        if c.nodes[old].start >= c.nodes[new].start:
            if c.nodes[old].shared == 0:
                c.nodes[old].superseded = 1
                reoffer(c, old)
            old = c.nodes[old].parent
        else:
            c.nodes[new].superseded = 0
            reoffer(c, new)
            new = c.nodes[new].parent


@core
def pinned_pages(c: Cache, extra: int) -> int:
    """Pages that running requests hold in the tree, and those on the path to ``extra``, each once."""
    s = c.state[0]
    s.mark += 1
    total = 0
    for k in range(-1, s.running):
        node = extra if k < 0 else c.requests[c.running[k]].end
        while node != ROOT and c.nodes[node].mark != s.mark:
            n = c.nodes[node]
            n.mark = s.mark
            total += n.resident
            node = n.parent
    return total
