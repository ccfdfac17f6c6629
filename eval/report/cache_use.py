"""What was recorded of the cache over time: how full it was, and whose pages left it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.attribution.pages import DEVICE
from traces.replay.events import KvEvents
from traces.replay.metrics import Sample, over_time
from traces.replay.record import RequestRecord

NOBODY = -1
USED_TOKENS = "sglang:num_used_tokens"  # what running requests hold; what could be evicted is no part of it


class Use(NamedTuple):
    """Tokens on the device over time."""

    title: str
    definition: str
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
                    before = int(np.count_nonzero(part))
                    now += count - before if stores else -before
                    part[:] = stores
        at.append(batch.at)
        used.append(now * events.header.page_size)
    return Use(
        "in the cache",
        "tokens in the device's cache after each batch of cache events",
        np.array(at, dtype=np.float64),
        np.array(used, dtype=np.int64),
    )


def held_by_requests(samples: Sequence[Sample]) -> Use | None:
    """KV that running requests hold, as the server's gauge has it; None where it was not sampled."""
    found = over_time(list(samples), USED_TOKENS)
    if not found:
        return None
    at, tokens = zip(*found, strict=True)
    return Use(
        "held by requests",
        f"tokens that running requests hold ({USED_TOKENS}, sampled)",
        np.array(at, dtype=np.float64),
        np.array(tokens, dtype=np.int64),
    )


def evictions(events: KvEvents, records: Sequence[RequestRecord]) -> list[Evicted]:
    """What left the device, batch by batch and session by session; pages of no recorded request are left out."""
    names, owner = _owners(events, records)
    edges = np.flatnonzero(owner[1:] != owner[:-1])  # last pages of runs of one owner
    lost: dict[tuple[int, int], int] = {}  # batch, session -> pages
    for number, batch in enumerate(events.batches):
        for op in batch.ops:
            if op[0] != "remove" or op[1] != DEVICE:
                continue
            for first, count in op[2]:
                inside = edges[edges.searchsorted(first) : edges.searchsorted(first + count - 1)].tolist()
                for start, end in pairwise((first, *(edge + 1 for edge in inside), first + count)):
                    key = (number, int(owner[start]))
                    lost[key] = lost.get(key, 0) + end - start
    return [
        Evicted(events.batches[number].at, names[session], pages * events.header.page_size)
        for (number, session), pages in lost.items()
        if session != NOBODY
    ]


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
