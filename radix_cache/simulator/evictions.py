"""What left the cache, in order: an optional log of the compiled core, for attribution. Off, it has no room."""

from __future__ import annotations

from typing import Any

import numpy as np

from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import Records
from radix_cache.simulator.memory import record_at

DEVICE, HOST, SPLIT = 0, 1, 2

EVICTION = np.dtype(
    [
        ("kind", "i4"),  # tier that lost pages; SPLIT: a node got a head of its own, nothing was lost
        ("node", "i4"),
        ("request", "i4"),  # that needed the room; SPLIT: the head
        ("end", "i4"),  # pages from the root to the last one lost
        ("pages", "i4"),
        ("stamp", "i8"),  # start of the request, as in ``FATE.start_stamp``
    ],
    align=True,
)


@core
def note(c: Any, kind: int, node: int, request: int, end: int, pages: int) -> None:
    """Append to the log. What finds no room is counted all the same, so that the run can be done again with more."""
    if c.logged < c.log_room:
        entry = record_at(c.log, c.logged, EVICTION)
        entry.kind = kind
        entry.node = node
        entry.request = request
        entry.end = end
        entry.pages = pages
        entry.stamp = c.stamp
    c.logged += 1


def empty_log(room: int) -> Records:
    return np.zeros(room, dtype=EVICTION)
