"""What the recorded cache events say over time: how full the cache was, and whose pages left it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.attribution.pages import DEVICE
from traces.replay.events import KvEvents
from traces.replay.record import RequestRecord

NOBODY = -1


class Use(NamedTuple):
    """Cached tokens on the device after each batch of events."""

    at_s: npt.NDArray[np.float64]  # run's clock, seconds
    tokens: npt.NDArray[np.int64]


class Evicted(NamedTuple):
    at_s: float  # run's clock
    session: str  # the first that had these pages
    tokens: int


def cache_use(events: KvEvents) -> Use:
    """Tokens in the device's cache over time; those of running requests count once the cache has them."""
    held = np.zeros(_page_count(events), dtype=np.bool_)
    now, at, used = 0, [], []
    for batch in events.batches:
        for op in batch.ops:
            if op[0] == "clear":
                held[:] = False
                now = 0
            elif op[1] == DEVICE:
                stores = op[0] == "store"
                for first, count in op[2]:
                    part = held[first : first + count]
                    changed = count - int(part.sum()) if stores else -int(part.sum())
                    part[:] = stores
                    now += changed
        at.append(batch.at)
        used.append(now * events.header.page_size)
    return Use(np.array(at, dtype=np.float64), np.array(used, dtype=np.int64))


def evictions(events: KvEvents, records: Sequence[RequestRecord]) -> list[Evicted]:
    """What left the device, batch by batch and session by session; pages of no recorded request are left out."""
    names, owner = _owners(events, records)
    found: list[Evicted] = []
    for batch in events.batches:
        lost: dict[int, int] = {}
        for op in batch.ops:
            if op[0] != "remove" or op[1] != DEVICE:
                continue
            for first, count in op[2]:
                for session, pages in _runs(owner[first : first + count]):
                    lost[session] = lost.get(session, 0) + pages
        found += [
            Evicted(batch.at, names[session], pages * events.header.page_size)
            for session, pages in lost.items()
            if session != NOBODY
        ]
    return found


def _owners(events: KvEvents, records: Sequence[RequestRecord]) -> tuple[list[str], npt.NDArray[np.int32]]:
    """Sessions, and for each page the number of the first one that had it."""
    owner = np.full(_page_count(events), NOBODY, dtype=np.int32)
    numbers: dict[str, int] = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        path = events.paths.get((record.session, record.flow, record.turn))
        if path is None:
            continue
        session = numbers.setdefault(record.session, len(numbers))
        for first, count in (*path.prompt, *path.answer):
            part = owner[first : first + count]
            if part[-1] == NOBODY:  # most of a prompt is its predecessor's
                part[part == NOBODY] = session
    return list(numbers), owner


def _runs(values: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    """Runs of equal values: (value, how many)."""
    edges = [0, *(np.flatnonzero(values[1:] != values[:-1]) + 1).tolist(), len(values)]
    yield from ((int(values[start]), end - start) for start, end in pairwise(edges) if start < end)


def _page_count(events: KvEvents) -> int:
    """Page numbers that are in use."""
    most = 0
    for batch in events.batches:
        for op in batch.ops:
            if op[0] != "clear":
                most = max(most, max((first + count for first, count in op[2]), default=0))
    for path in events.paths.values():
        most = max(most, max((first + count for first, count in (*path.prompt, *path.answer)), default=0))
    return most
