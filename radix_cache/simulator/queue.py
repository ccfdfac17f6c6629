"""The event queue: a binary heap in an array, by time and then by order of arrival."""

from __future__ import annotations

from typing import Any

import numpy as np

from radix_cache.simulator.jit import core
from radix_cache.simulator.memory import record_at

EVENT = np.dtype([("time", "f8"), ("number", "i8"), ("kind", "i4"), ("request", "i4")], align=True)


@core
def event_at(p: Any, index: int) -> Any:
    return record_at(p.events, index, EVENT)


@core
def earlier(a: Any, b: Any) -> bool:
    return bool(a.time < b.time or (a.time == b.time and a.number < b.number))


@core
def copy_event(source: Any, target: Any) -> None:
    target.time, target.number = source.time, source.number
    target.kind, target.request = source.kind, source.request


@core
def push(p: Any, time: float, kind: int, request: int) -> None:
    at = p.event_count
    p.event_count += 1
    number = p.numbered
    p.numbered += 1
    while at > 0:
        above = (at - 1) // 2
        e = event_at(p, above)
        if e.time <= time:  # among equals the one pushed first
            break
        copy_event(e, event_at(p, at))
        at = above
    e = event_at(p, at)
    e.time, e.number, e.kind, e.request = time, number, kind, request


@core
def pop(p: Any) -> tuple[float, int, int]:
    first = event_at(p, 0)
    time, kind, request = first.time, first.kind, first.request
    p.event_count -= 1
    size = p.event_count
    last = event_at(p, size)
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        if below + 1 < size and earlier(event_at(p, below + 1), event_at(p, below)):
            below += 1
        if earlier(last, event_at(p, below)):
            break
        copy_event(event_at(p, below), event_at(p, at))
        at = below
    copy_event(last, event_at(p, at))
    return time, kind, request
