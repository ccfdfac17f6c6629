"""Victim order: which leaf goes next. Pairing heaps inside arrays, one for each (group, age bin).

Within a bucket the order never changes while time passes, so a leaf is scored once, when it becomes one. Where
ranks are learned, a leaf moves to the next bin when it has aged that far: at most once per bin and use.
"""

from __future__ import annotations

from typing import Any

from radix_cache.gaps import age_bin as _age_bin
from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, place_at
from radix_cache.simulator.memory import INDEX, NUMBER, floats_at, record_at

age_bin = core(_age_bin)


@core
def root_at(o: Any, bucket: int) -> Any:
    return record_at(o.roots, bucket, INDEX)


@core
def bucket_of(o: Any, group: int, age: float) -> int:
    """Bucket of a group at an age in seconds."""
    if o.bins == 1:
        return int(group)
    return int(group * o.bins + age_bin(age, floats_at(o.edges, 1, o.bins + 1)[0]))


@core
def before(key: float, stamp: int, other: Any) -> bool:
    """Whether (key, stamp) goes before a place."""
    return bool(key < other.key or (key == other.key and stamp < other.stamp))


@core
def meld(o: Any, a: int, b: int) -> int:
    """Root of the union of two heaps; either may be NONE."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    above, below = place_at(o, a), place_at(o, b)
    if before(below.key, below.stamp, above):
        a, b = b, a
        above, below = below, above
    child = above.child
    below.sibling = child
    below.previous = a
    if child != NONE:
        place_at(o, child).previous = b
    above.child = b
    above.sibling = NONE
    above.previous = NONE
    return a


@core
def meld_siblings(o: Any, first: int) -> int:
    """One heap from a list of siblings: pairs from the left, then all pairs from the right."""
    pairs = NONE
    while first != NONE:
        second = place_at(o, first).sibling
        if second == NONE:
            place_at(o, first).sibling = pairs
            pairs = first
            break
        rest = place_at(o, second).sibling
        place_at(o, first).sibling = NONE
        place_at(o, second).sibling = NONE
        root = meld(o, first, second)
        place_at(o, root).sibling = pairs
        pairs = root
        first = rest
    root = NONE
    while pairs != NONE:
        rest = place_at(o, pairs).sibling
        place_at(o, pairs).sibling = NONE
        root = meld(o, root, pairs)
        pairs = rest
    if root != NONE:
        place_at(o, root).previous = NONE
        place_at(o, root).sibling = NONE
    return root


@core
def discard(o: Any, node: int) -> None:
    """Take a node out of the order; nothing happens when it is not in it."""
    place = place_at(o, node)
    if place.bucket == NONE:
        return
    root = root_at(o, place.bucket)
    below = meld_siblings(o, place.child)
    if root.value == node:
        root.value = below
    else:
        left = place_at(o, place.previous)
        if left.child == node:
            left.child = place.sibling
        else:
            left.sibling = place.sibling
        if place.sibling != NONE:
            place_at(o, place.sibling).previous = place.previous
        root.value = meld(o, root.value, below)
    place.bucket = NONE


@core
def put(o: Any, node: int, bucket: int, key: float, stamp: int) -> None:
    """Add a node that is not in the order."""
    place = place_at(o, node)
    place.key = key
    place.stamp = stamp
    place.child = NONE
    place.sibling = NONE
    place.previous = NONE
    place.bucket = bucket
    root = root_at(o, bucket)
    root.value = meld(o, root.value, node)
    listed = record_at(o.listed, bucket, INDEX)
    if listed.value == NONE:
        count = record_at(o.alive, 0, INDEX)
        count.value += 1
        record_at(o.alive, count.value, INDEX).value = bucket
        listed.value = 1


@core
def grow_old(o: Any, now: float) -> None:
    """Move every leaf to the bin of its age. The key of a learned group is the last access."""
    if o.bins == 1:
        return
    count = record_at(o.alive, 0, INDEX)
    at = 1
    while at <= count.value:  # buckets that come alive on the way are older ones, and come later in the list
        bucket = record_at(o.alive, at, INDEX).value
        at += 1
        if bucket % o.bins == o.bins - 1:
            continue
        root = root_at(o, bucket)
        until = record_at(o.edges, bucket % o.bins + 1, NUMBER).value
        while root.value != NONE:
            oldest = root.value
            place = place_at(o, oldest)
            age = now - place.key
            if age < until:
                break
            key, stamp = place.key, place.stamp
            discard(o, oldest)
            put(o, oldest, bucket_of(o, bucket // o.bins, age), key, stamp)


@core
def least(o: Any) -> int:
    """The next victim, or NONE. Call ``grow_old`` first when time has passed."""
    if o.groups * o.bins == 1:
        return int(root_at(o, 0).value)
    best = NONE
    best_rank = 0.0
    count = record_at(o.alive, 0, INDEX)
    at = 1
    while at <= count.value:
        bucket = record_at(o.alive, at, INDEX).value
        node = root_at(o, bucket).value
        if node == NONE:
            record_at(o.listed, bucket, INDEX).value = NONE
            record_at(o.alive, at, INDEX).value = record_at(o.alive, count.value, INDEX).value
            count.value -= 1
            continue
        at += 1
        rank = record_at(o.ranks, bucket, NUMBER).value
        place = place_at(o, node)
        if (
            best == NONE
            or rank < best_rank
            or (rank == best_rank and before(place.key, place.stamp, place_at(o, best)))
        ):
            best, best_rank = node, rank
    return best
