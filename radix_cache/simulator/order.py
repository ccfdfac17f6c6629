"""Victim order: which leaf goes next. Pairing heaps inside arrays, one for each (group, age bin).

Within a bucket the order never changes while time passes, so a leaf is scored once, when it becomes one. Where
ranks are learned, a leaf moves to the next bin when it has aged that far: at most once per bin and use.
"""

from __future__ import annotations

from typing import Any

from radix_cache.gaps import age_bin as _age_bin
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, Order

age_bin = core(_age_bin)


@core
def precedes(places: Any, a: int, b: int) -> bool:
    if places[a].key != places[b].key:
        return bool(places[a].key < places[b].key)
    return bool(places[a].stamp < places[b].stamp)


@core
def meld(places: Any, a: int, b: int) -> int:
    """Root of the union of two heaps; either may be NONE."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    if precedes(places, b, a):
        a, b = b, a
    child = places[a].child
    places[b].sibling = child
    places[b].previous = a
    if child != NONE:
        places[child].previous = b
    places[a].child = b
    places[a].sibling = NONE
    places[a].previous = NONE
    return a


@core
def meld_siblings(places: Any, first: int) -> int:
    """One heap from a list of siblings: pairs from the left, then all pairs from the right."""
    pairs = NONE
    while first != NONE:
        second = places[first].sibling
        if second == NONE:
            places[first].sibling = pairs
            pairs = first
            break
        rest = places[second].sibling
        places[first].sibling = NONE
        places[second].sibling = NONE
        root = meld(places, first, second)
        places[root].sibling = pairs
        pairs = root
        first = rest
    root = NONE
    while pairs != NONE:
        rest = places[pairs].sibling
        places[pairs].sibling = NONE
        root = meld(places, root, pairs)
        pairs = rest
    if root != NONE:
        places[root].previous = NONE
        places[root].sibling = NONE
    return root


@core
def discard(order: Order, node: int) -> None:
    """Take a node out of the order; nothing happens when it is not in it."""
    places, roots = order.places, order.roots
    bucket = places[node].bucket
    if bucket == NONE:
        return
    below = meld_siblings(places, places[node].child)
    if roots[bucket] == node:
        roots[bucket] = below
    else:
        left, right = places[node].previous, places[node].sibling
        if places[left].child == node:
            places[left].child = right
        else:
            places[left].sibling = right
        if right != NONE:
            places[right].previous = left
        roots[bucket] = meld(places, roots[bucket], below)
    places[node].bucket = NONE


@core
def put(order: Order, node: int, bucket: int, key: float, stamp: int) -> None:
    """Add a node that is not in the order."""
    place = order.places[node]
    place.key = key
    place.stamp = stamp
    place.child = NONE
    place.sibling = NONE
    place.previous = NONE
    place.bucket = bucket
    order.roots[bucket] = meld(order.places, order.roots[bucket], node)
    if order.listed[bucket] == NONE:
        order.alive[0] += 1
        order.alive[order.alive[0]] = bucket
        order.listed[bucket] = 1


@core
def put_aged(order: Order, node: int, group: int, key: float, stamp: int, age: float) -> None:
    """Add a node to the bucket of its group and age."""
    bins = order.ranks.shape[1]
    put(order, node, group * bins + (age_bin(age, order.edges) if bins > 1 else 0), key, stamp)


@core
def grow_old(order: Order, now: float) -> None:
    """Move every leaf to the bin of its age. The key of a learned group is the last access."""
    bins = order.ranks.shape[1]
    if bins == 1:
        return
    at = 1
    while at <= order.alive[0]:  # buckets that come alive on the way are older ones, and come later in the list
        bucket = order.alive[at]
        at += 1
        if bucket % bins == bins - 1:
            continue
        until = order.edges[bucket % bins + 1]
        while order.roots[bucket] != NONE:
            oldest = order.roots[bucket]
            age = now - order.places[oldest].key
            if age < until:
                break
            key, stamp = order.places[oldest].key, order.places[oldest].stamp
            discard(order, oldest)
            put_aged(order, oldest, bucket // bins, key, stamp, age)


@core
def least(order: Order) -> int:
    """The next victim, or NONE. Call ``grow_old`` first when time has passed."""
    bins = order.ranks.shape[1]
    best = NONE
    best_rank = 0.0
    at = 1
    while at <= order.alive[0]:
        bucket = order.alive[at]
        node = order.roots[bucket]
        if node == NONE:
            order.listed[bucket] = NONE
            order.alive[at] = order.alive[order.alive[0]]
            order.alive[0] -= 1
            continue
        at += 1
        rank = order.ranks[bucket // bins, bucket % bins]
        if best == NONE or rank < best_rank or (rank == best_rank and precedes(order.places, node, best)):
            best, best_rank = node, rank
    return best
