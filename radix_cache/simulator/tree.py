"""The radix tree of one cache: match, insert, pin. All walks go from a node towards the root.

The workload's prompts form a static trie whose nodes are runs of pages (``radix_cache.simulator.workload``). The
cache holds a prefix of it: a node is resident with its first ``resident`` pages, and only below full nodes. So

- the longest match of a prompt is the first resident node above its end: no walk from the root is needed;
- a node's last use and hits are those of the nodes below it too. They are written only where a prompt ends and
  handed to the parent when the child leaves, so they are exact for leaves, which is all that a policy looks at;
- a running request pins the node where its prompt ends: what has resident children is no candidate anyway.

A request costs what it changes, not what it reads: a hit of 2,000 pages costs the same as one of 10.
"""

from __future__ import annotations

from typing import Any

from radix_cache.simulator.evictions import SPLIT, note
from radix_cache.simulator.host_tier import leave_host
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, ROOT, device, flow_at, host, node_at, place_at, request_at
from radix_cache.simulator.memory import INDEX, record_at
from radix_cache.simulator.order import discard
from radix_cache.simulator.victims import reoffer


@core
def match(c: Any, node: int) -> int:
    """Deepest resident node at or above ``node``."""
    n = node_at(c, node)
    while n.resident == 0:
        node = n.parent
        n = node_at(c, node)
    return int(node)


@core
def use_now(c: Any, node: int) -> None:
    """A node looks used now, by nobody in particular."""
    n = node_at(c, node)
    n.time = c.now
    n.stamp = c.stamp


@core
def cut(c: Any, node: int) -> None:
    """A request parts here: the server's radix node ends at this one, and what was below is a node of its own.

    SGLang makes the tail of a split node as recent as the request that split it, though nothing used the tail. Where
    whole nodes go that is kept, so that they go in its order.
    """
    below = node_at(c, node).joined
    node_at(c, node).joined = NONE
    if below == NONE:
        return
    while node_at(c, below).joined != NONE:
        below = node_at(c, below).joined
    if c.truncate == 0:
        use_now(c, node)
        use_now(c, below)
    elif device(c).uses_depth == 0:
        return
    reoffer(c, below)


@core
def split(c: Any, node: int, pages: int) -> int:
    """Give the first ``pages`` pages of a node, all resident, a node of their own: the head. Returns the head.

    The node keeps its end, and with it what points there: what is below, the prompts that end there, its pins.
    """
    head = c.node_count
    c.node_count += 1
    n = node_at(c, node)
    h = node_at(c, head)
    h.parent, h.start, h.length, h.level = n.parent, n.start, pages, n.level
    h.resident, h.pins, h.joined = pages, 0, NONE
    h.owner, h.first, h.used_by = n.owner, n.first, n.used_by
    h.host, h.host_kids, h.mark = 0, 0, 0
    h.shared, h.superseded = n.shared, n.superseded
    h.inserted, h.time, h.stamp, h.seen = n.inserted, n.time, n.stamp, n.seen
    h.context, h.stop, h.pace = n.context, n.stop, n.pace
    place_at(device(c), head).bucket = NONE
    if c.host_capacity > 0:
        place_at(host(c), head).bucket = NONE
    above = node_at(c, n.parent)
    if above.joined == node:
        above.joined = head
    if c.log_room > 0:
        note(c, SPLIT, node, head, h.start + h.length, 0)
    n.parent = head
    n.start += pages
    n.length -= pages
    n.resident -= pages
    if n.resident > 0:
        h.kids, h.hits = 1, 0.0  # the head has the hits of what is below it
        if c.truncate == 0:
            use_now(c, head)
            use_now(c, node)
            reoffer(c, node)
    else:
        h.kids, h.hits = 0, n.hits
        n.hits = 0.0
    return int(head)


@core
def touch(c: Any, node: int, flow: int, request: int) -> None:
    """Record a use of a node; those above it inherit it."""
    n = node_at(c, node)
    n.time = c.now
    n.stamp = c.stamp
    n.owner = flow
    n.used_by = request
    f = flow_at(c, flow)
    n.context = f.context
    n.stop = f.stop
    n.pace = f.pace


@core
def note_user(c: Any, node: int, flow: int) -> None:
    """Find out which nodes at and above ``node`` now have several users."""
    while node != ROOT:
        n = node_at(c, node)
        if n.first == flow or n.shared != 0:
            return
        n.shared = 1
        n.superseded = 0
        node = n.parent


@core
def enter(c: Any, node: int, pages: int, below: int, flow: int, request: int) -> None:
    """The first ``pages`` of a node come into the cache; with its child ``below``, if any, it is one radix node."""
    n = node_at(c, node)
    n.resident = pages
    n.inserted = c.now
    n.seen = c.now
    n.hits = 0.0
    n.first = flow
    n.shared = 0
    n.superseded = 0
    n.joined = below
    touch(c, node, flow, request)
    node_at(c, n.parent).kids += 1
    c.used += pages
    c.inserted += pages


@core
def insert(c: Any, end: int, flow: int, request: int) -> int:
    """Make the path to ``end`` resident and record its use. Returns the number of pages inserted.

    There must be room, and the resident part must be safe from eviction.
    """
    frontier = match(c, end)
    if frontier != ROOT:
        f = node_at(c, frontier)
        discard(device(c), frontier)
        if f.host > 0:
            leave_host(c, frontier, f.host)
        if f.resident < f.length:
            # What an eviction left of it is older than the pages to come.
            frontier = split(c, frontier, f.resident)
        touch(c, frontier, flow, request)
    cut(c, frontier)
    inserted = 0
    below = NONE
    node = end
    while node != frontier:
        n = node_at(c, node)
        if n.host > 0:
            leave_host(c, node, n.host)
        enter(c, node, n.length, below, flow, request)
        inserted += n.length
        below = node
        node = n.parent
    cut(c, end)
    touch(c, end, flow, request)
    note_user(c, frontier, flow)
    return inserted


@core
def supersede(c: Any, old: int, new: int) -> None:
    """A flow went from the path to ``old`` to the path to ``new``: what is only on the old one is abandoned."""
    while old != new:
        if node_at(c, old).start >= node_at(c, new).start:
            n = node_at(c, old)
            if n.shared == 0 and n.superseded == 0:
                n.superseded = 1
                reoffer(c, old)
            old = n.parent
        else:
            n = node_at(c, new)
            if n.superseded != 0:
                n.superseded = 0
                reoffer(c, new)
            new = n.parent


@core
def rejoin(c: Any, node: int, above: int) -> None:
    """A flow's answer leads from ``above`` to ``node``: a branch that it had abandoned may be its newest again.

    Only the nodes' marks: all but ``node`` have kids, and the caller scores that one.
    """
    while node != above:
        node_at(c, node).superseded = 0
        node = node_at(c, node).parent


@core
def pinned_pages(c: Any, extra: int) -> int:
    """Pages that running requests hold in the tree, and those on the path to ``extra``, each once."""
    c.mark += 1
    total = 0
    for k in range(-1, c.running_count):
        node = extra if k < 0 else request_at(c, record_at(c.running, k, INDEX).value).end
        while node != ROOT and node_at(c, node).mark != c.mark:
            n = node_at(c, node)
            n.mark = c.mark
            total += n.resident
            node = n.parent
    return total
