"""The host tier as a victim cache: what the device evicts and may be asked for again goes there, and leaves it again.

What is worth a place is asked of the live side's own rule. A node that is lost goes there all the same while something
below it is there: that is reached through it only.
"""

from __future__ import annotations

from typing import Any

from radix_cache.admission.host import lost
from radix_cache.simulator.evictions import HOST, note
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, flow_at, host, node_at
from radix_cache.simulator.order import bucket_of, discard, grow_old, least, put
from radix_cache.simulator.score import score, worth_taking

_lost = core(lost)


@core
def worth_hosting(c: Any, node: int) -> bool:
    """Whether pages that a node loses on the device go to the host tier."""
    n = node_at(c, node)
    if c.host_takes_all != 0 or n.host > 0 or n.host_kids > 0:
        return True
    return bool(_lost(n.shared, n.superseded, flow_at(c, n.owner).state) == 0)


@core
def offer_host(c: Any, node: int) -> None:
    """Put a node into the host tier's victim order if it may leave."""
    n = node_at(c, node)
    if n.host == 0 or n.host_kids > 0:
        return
    group, key = score(c, host(c), node, n.start + n.resident + n.host, 1)
    put(host(c), node, bucket_of(host(c), group, c.now - n.time), key, n.stamp)


@core
def leave_host(c: Any, node: int, pages: int) -> None:
    """Remove the last ``pages`` host pages of a node."""
    n = node_at(c, node)
    n.host -= pages
    c.host_used -= pages
    if n.host > 0:
        return
    discard(host(c), node)
    above = node_at(c, n.parent)
    above.host_kids -= 1
    if above.host_kids == 0 and above.host > 0:
        offer_host(c, n.parent)


@core
def shrink_host(c: Any) -> None:
    """Bring the host tier back to its capacity."""
    o = host(c)
    if c.host_used > c.host_capacity:
        grow_old(o, c.now)
    while c.host_used > c.host_capacity:
        victim = least(o)
        if victim == NONE:
            c.broken = 1
            return
        n = node_at(c, victim)
        pages = min(n.host, c.host_used - c.host_capacity)
        pages = worth_taking(c, o, victim, n.start + n.resident + n.host, pages)
        if c.log_room > 0:
            note(c, HOST, victim, c.cause, n.start + n.resident + n.host, pages)
        leave_host(c, victim, pages)
        c.host_dropped += pages
        if n.host > 0 and o.uses_depth != 0:
            discard(o, victim)
            offer_host(c, victim)


@core
def host_match(c: Any, node: int, frontier: int) -> int:
    """Host pages on the path to ``node`` that follow the device's match."""
    run = 0
    while True:
        n = node_at(c, node)
        if node == frontier:
            return int(run + n.host if n.resident + n.host == n.length else n.host)
        run = run + n.host if n.host == n.length else n.host
        node = n.parent
