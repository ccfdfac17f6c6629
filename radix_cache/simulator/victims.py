"""Which leaves may be evicted, and evicting them."""

from __future__ import annotations

from typing import Any

from radix_cache.features import FlowState
from radix_cache.simulator.evictions import DEVICE, HOST, note
from radix_cache.simulator.host_tier import offer_host, shrink_host, worth_hosting
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, ROOT, device, flow_at, host, node_at, place_at
from radix_cache.simulator.order import before, bucket_of, discard, grow_old, least, put
from radix_cache.simulator.score import radix_length, score, worth_taking

_ENDED = int(FlowState.ENDED)
_PARKED = int(FlowState.PARKED)


@core
def is_leaf(n: Any, node: int) -> bool:
    """Whether a node may be evicted."""
    return bool(node != ROOT and n.kids == 0 and n.pins == 0 and n.resident > 0)


@core
def wanted_place(c: Any, o: Any, node: int) -> tuple[int, float]:
    """(bucket, key) of a leaf of the device now."""
    n = node_at(c, node)
    size = 1 if c.truncate != 0 else radix_length(c, node)
    group, key = score(c, o, node, n.start + n.resident, size)
    return bucket_of(o, group, c.now - n.time), key


@core
def offer(c: Any, node: int) -> None:
    """Put a node into the device's victim order if it may be evicted."""
    n = node_at(c, node)
    if is_leaf(n, node):
        o = device(c)
        bucket, key = wanted_place(c, o, node)
        put(o, node, bucket, key, n.stamp)


@core
def reoffer(c: Any, node: int) -> None:
    """Score a leaf again after its state changed."""
    if place_at(device(c), node).bucket != NONE:
        discard(device(c), node)
        offer(c, node)
    if node_at(c, node).host > 0 and place_at(host(c), node).bucket != NONE:
        discard(host(c), node)
        offer_host(c, node)


@core
def count_evicted(c: Any, n: Any, pages: int) -> None:
    if n.superseded != 0:
        c.evicted_superseded += pages
        return
    state = flow_at(c, n.owner).state
    if state == _ENDED:
        c.evicted_ended += pages
    elif state == _PARKED:
        c.evicted_parked += pages
    else:
        c.evicted_live += pages


@core
def into_host(c: Any, node: int, pages: int) -> None:
    """Count the pages of a victim to the host tier."""
    n = node_at(c, node)
    if n.host == 0:
        node_at(c, n.parent).host_kids += 1
        discard(host(c), n.parent)
    else:
        discard(host(c), node)
    n.host += pages
    c.host_used += pages


@core
def hand_up(c: Any, node: int) -> None:
    """A node has left: its parent has one kid less and inherits its last use and hits."""
    n = node_at(c, node)
    above = node_at(c, n.parent)
    n.joined = NONE
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


@core
def take_last(c: Any, node: int, pages: int) -> None:
    """Remove the last ``pages`` resident pages of a leaf from the device, into the host tier where it takes them."""
    n = node_at(c, node)
    if c.log_room > 0:
        note(c, DEVICE, node, c.cause, n.start + n.resident, pages)
    n.resident -= pages
    c.used -= pages
    count_evicted(c, n, pages)
    if c.host_capacity > 0 and worth_hosting(c, node):
        into_host(c, node, pages)
    elif c.host_capacity > 0:
        c.host_dropped += pages
        if c.log_room > 0:
            note(c, HOST, node, c.cause, n.start + n.resident + pages, pages)


@core
def settle_host(c: Any, node: int) -> None:
    """After pages of ``node`` went: it may be a victim of the host tier now, and that may be over its size."""
    if c.host_capacity > 0:
        offer_host(c, node)
        shrink_host(c)


@core
def next_in_line(c: Any, o: Any, node: int, bucket: int) -> bool:
    """Offer the parent of the victim ``node`` that has left; true when it goes next for sure and was not put.

    It mostly does: what is left of a conversation was used no later than its tail.
    """
    parent = node_at(c, node).parent
    n = node_at(c, parent)
    if not is_leaf(n, parent):
        return False
    wanted, key = wanted_place(c, o, parent)
    if wanted == bucket and not before(place_at(o, node).key, place_at(o, node).stamp, _here(o, parent, key, n.stamp)):
        return True
    put(o, parent, wanted, key, n.stamp)
    return False


@core
def _here(o: Any, node: int, key: float, stamp: int) -> Any:
    """A node's place, with its key and stamp written but not in any heap."""
    place = place_at(o, node)
    place.key = key
    place.stamp = stamp
    return place


@core
def evict_tails(c: Any, pages: int) -> bool:
    """Free exactly ``pages``, page by page from the ends of victims. False when too little is evictable."""
    o = device(c)
    target = c.used - pages
    while c.used > target:
        victim = least(o)
        if victim == NONE:
            return False
        bucket = place_at(o, victim).bucket
        while True:
            n = node_at(c, victim)
            c.evictions += 1
            take_last(c, victim, worth_taking(c, o, victim, n.start + n.resident, min(n.resident, c.used - target)))
            goes_on = False
            if n.resident == 0:
                discard(o, victim)
                hand_up(c, victim)
                goes_on = next_in_line(c, o, victim, bucket)
            elif o.uses_depth != 0 or place_at(o, victim).bucket == NONE:
                discard(o, victim)
                offer(c, victim)
            settle_host(c, victim)
            if not goes_on:
                break
            victim = n.parent
            if c.used <= target:
                put(o, victim, bucket, place_at(o, victim).key, place_at(o, victim).stamp)
                break
    return True


@core
def evict_nodes(c: Any, pages: int) -> bool:
    """Free at least ``pages``, whole radix nodes at once. False when too little is evictable."""
    o = device(c)
    target = c.used - pages
    while c.used > target:
        victim = least(o)
        if victim == NONE:
            return False
        c.evictions += 1
        while victim != NONE:
            n = node_at(c, victim)
            parent = n.parent
            whole = node_at(c, parent).joined == victim
            if whole:
                node_at(c, parent).joined = NONE
            take_last(c, victim, n.resident)
            discard(o, victim)
            hand_up(c, victim)
            offer(c, parent)
            settle_host(c, victim)
            victim = parent if whole else NONE
    return True


@core
def evict(c: Any, pages: int) -> bool:
    """Free at least ``pages``; exactly, where victims are truncated. False when too little is evictable."""
    if pages <= 0:
        return True
    grow_old(device(c), c.now)
    return evict_tails(c, pages) if c.truncate != 0 else evict_nodes(c, pages)
