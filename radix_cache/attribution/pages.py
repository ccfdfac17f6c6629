"""Which pages a cache holds, and what became of those it does not: arrays over page numbers.

A page number stands for a page of tokens *and everything before it*, so a prompt is a path of numbers. Numbers that
follow each other are written as a range; a path is an int64 array of shape (k, 2): first number, count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ranges = npt.NDArray[np.int64]  # shape (k, 2)
Numbers = npt.NDArray[np.int64]  # shape (n,)

DEVICE, HOST, STORAGE = 1, 2, 4  # tiers, as bits
NONE = -1


def as_ranges(pairs: Iterable[Iterable[int]]) -> Ranges:
    """Ranges from pairs (first, count).

    Raises:
        ValueError: not pairs, a negative number, or a count below 1.
    """
    parts = [tuple(pair) for pair in pairs]
    if not parts:
        return np.empty((0, 2), dtype=np.int64)
    if any(len(part) != 2 or part[0] < 0 or part[1] < 1 for part in parts):
        raise ValueError("page ranges must be pairs of a first number >= 0 and a count >= 1")
    return np.array(parts, dtype=np.int64)


def length(ranges: Ranges) -> int:
    """Pages of a path."""
    return sum(ranges[:, 1].tolist())  # few: a reduction by numpy costs more


def head(ranges: Ranges, pages: int) -> Ranges:
    """The first ``pages`` pages of a path."""
    ends = np.cumsum(ranges[:, 1])
    whole = int(np.searchsorted(ends, pages, side="right"))
    if whole == len(ranges):
        return ranges
    before = int(ends[whole - 1]) if whole else 0
    if pages == before:
        return ranges[:whole]
    cut = ranges[: whole + 1].copy()
    cut[whole, 1] = pages - before
    return cut


def numbers(ranges: Ranges, start: int, end: int) -> Numbers:
    """Page numbers at positions ``start`` to ``end`` of a path."""
    parts, at = [], 0
    for first, count in ranges.tolist():
        low, high = max(start - at, 0), min(end - at, count)
        if low < high:
            parts.append(np.arange(first + low, first + high, dtype=np.int64))
        at += count
        if at >= end:
            break
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class Run(NamedTuple):
    """Pages of a path, next to each other, with the same fate."""

    at: int  # position in the path
    pages: int
    tiers: int  # bits of the tiers that hold them
    stored: bool  # some tier ever held them
    removal: int  # index of the removal that took them from the last tier; NONE: never removed
    user: int  # request that used them last; NONE: nobody
    maker: int  # request that was the first to have them; NONE: nobody


class PageState:
    """What is where. Grows with the numbers it is told of."""

    def __init__(self, pages: int = 0) -> None:
        self.tiers = np.zeros(pages, dtype=np.uint8)
        self.stored = np.zeros(pages, dtype=np.bool_)
        self.removal = np.full(pages, NONE, dtype=np.int32)
        self.user = np.full(pages, NONE, dtype=np.int32)
        self.maker = np.full(pages, NONE, dtype=np.int32)

    def reserve(self, pages: int) -> None:
        """Make room for numbers below ``pages``."""
        more = max(pages, 2 * len(self.tiers)) - len(self.tiers)
        if pages <= len(self.tiers):
            return
        for name, fill in (("tiers", 0), ("stored", 0), ("removal", NONE), ("user", NONE), ("maker", NONE)):
            old = getattr(self, name)
            setattr(self, name, np.concatenate((old, np.full(more, fill, dtype=old.dtype))))

    def store(self, ranges: Ranges, tier: int = DEVICE) -> None:
        for piece in self._slices(ranges):
            self.tiers[piece] |= tier
            self.stored[piece] = True

    def remove(self, ranges: Ranges, removal: int, tier: int = DEVICE) -> None:
        """Take pages out of a tier; ``removal`` is remembered where that was the last one that held them."""
        for piece in self._slices(ranges):
            held = self.tiers[piece] & tier != 0
            self.tiers[piece] &= np.uint8(0xFF ^ tier)
            gone = held & (self.tiers[piece] == 0)
            self.removal[piece][gone] = removal

    def clear(self, removal: int) -> None:
        """Every tier is emptied."""
        self.removal[self.tiers != 0] = removal
        self.tiers[:] = 0

    def claim(self, ranges: Ranges, request: int) -> None:
        """A request that computes these pages unless the cache has them; the first one is remembered."""
        for piece in self._slices(ranges):
            makers = self.maker[piece]
            makers[makers == NONE] = request

    def use(self, ranges: Ranges, request: int) -> None:
        for piece in self._slices(ranges):
            self.user[piece] = request

    def has(self, page: int, tier: int = 0xFF) -> bool:
        return page < len(self.tiers) and bool(self.tiers[page] & tier)

    def runs(self, ranges: Ranges, start: int, end: int) -> list[Run]:
        """What became of the pages at positions ``start`` to ``end`` of a path, in order, each page once."""
        pages = numbers(ranges, start, end)
        if not len(pages):
            return []
        self.reserve(int(pages.max()) + 1)
        facts = np.stack(
            [a[pages].astype(np.int64) for a in (self.tiers, self.stored, self.removal, self.user, self.maker)]
        )
        cuts = np.flatnonzero((facts[:, 1:] != facts[:, :-1]).any(axis=0)) + 1
        starts = np.concatenate(([0], cuts))
        counts = np.diff(np.concatenate((starts, [len(pages)])))
        rows = facts[:, starts].T.tolist()
        return [
            Run(start + at, count, tiers, bool(stored), removal, user, maker)
            for at, count, (tiers, stored, removal, user, maker) in zip(
                starts.tolist(), counts.tolist(), rows, strict=True
            )
        ]

    def _slices(self, ranges: Ranges) -> Iterator[slice]:
        parts = ranges.tolist()  # few: a reduction by numpy would cost more than all of them
        if parts:
            self.reserve(max(first + count for first, count in parts))
        for first, count in parts:
            yield slice(first, first + count)
