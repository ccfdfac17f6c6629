"""Victim order of a live cache: the same order as the simulator's, kept as heaps that are mended, not rebuilt.

SGLang scores every leaf anew at each eviction. Here a leaf is scored when it is used, and choosing a victim costs
a look at the top of a few heaps, whatever the number of leaves.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from radix_cache.eviction import EvictionPolicy
from radix_cache.gaps import AGE_BINS, AGE_EDGES, GapTable

Item = TypeVar("Item", bound=Hashable)
Rank = tuple[bool, float]  # (is learned, rank): groups with a fixed rank go before all learned ones

_EDGES = [float(edge) for edge in AGE_EDGES]
_SPARE_ENTRIES = 1024  # outdated entries that are always tolerated
_POPS = 16  # entries of a bin that are moved one by one; more are moved at once
_HEAPIFY_FROM = 8  # a heap that grows by more than one part in so many is cheaper to order anew


def age_bin(age: float) -> int:
    """``radix_cache.gaps.age_bin`` on a list: that one is written for compiled code and slow in plain Python."""
    return min(max(bisect_right(_EDGES, age) - 1, 0), AGE_BINS - 1)


def _first_younger(heap: Sequence[tuple[Any, ...]], start: int, age: float, now: float) -> int:
    """Where, from ``start`` on, the first entry below that age stands in a list sorted by last access."""
    return bisect_left(heap, True, lo=start, key=lambda entry: now - entry[0] < age)


class VictimOrder(Generic[Item]):
    """Items ordered by ``(rank of group, key, stamp)``, least first.

    Args:
        policy: says which groups have a learned rank: the last ones, with the last access in seconds as key.
        gaps: learned ranks by (reason to wait, age); read at every choice, never written.
    """

    def __init__(self, policy: EvictionPolicy, gaps: GapTable) -> None:
        self._first_learned = policy.learned_groups[0] if policy.learned_groups else policy.groups
        self._gaps = gaps
        # (group, age bin) -> heap of (key, stamp, number, item); an entry counts while its number is the item's.
        self._heaps: dict[tuple[int, int], list[tuple[float, float, int, Item]]] = {}
        self._number: dict[Item, int] = {}
        self._entries = 0
        self._next = 0
        self._queue: list[list[tuple[int, int]]] | None = None  # places by rank, the least last; None: not known
        self.rebuilds = 0  # times that outdated entries were cleared out

    def __len__(self) -> int:
        return len(self._number)

    def put(self, item: Item, group: int, key: float, stamp: float, now: float) -> None:
        """Add an item, or move it to where it belongs now."""
        self.put_all([(item, group, key, stamp)], now)

    def put_all(self, scored: Iterable[tuple[Item, int, float, float]], now: float) -> None:
        """Add items, given as (item, group, key, stamp), or move them to where they belong now. Many at once cost
        less than one by one."""
        fresh: dict[tuple[int, int], list[tuple[float, float, int, Item]]] = {}
        number = self._next
        for item, group, key, stamp in scored:
            number += 1
            self._number[item] = number
            place = (group, age_bin(now - key) if group >= self._first_learned else 0)
            if place in fresh:
                fresh[place].append((key, stamp, number, item))
            else:
                fresh[place] = [(key, stamp, number, item)]
        self._entries += number - self._next
        self._next = number
        for place, entries in fresh.items():
            heap = self._heaps.get(place)
            if heap is None:
                heap = self._heaps[place] = []
                self._queue = None
            if len(entries) * _HEAPIFY_FROM > len(heap):
                heap += entries
                heapq.heapify(heap)
            else:
                for entry in entries:
                    heapq.heappush(heap, entry)
        if self._entries > 2 * len(self._number) + _SPARE_ENTRIES:
            self._rebuild()

    def discard(self, item: Item) -> None:
        """Take an item out; nothing happens when it is not in."""
        self._number.pop(item, None)

    def rank(self, group: int, key: float, now: float) -> Rank:
        """Rank of a group at the age that ``key`` says, least first."""
        return self._rank(group, age_bin(now - key) if group >= self._first_learned else 0)

    def _rank(self, group: int, age: int) -> Rank:
        if group < self._first_learned:
            return False, float(group)
        return True, float(self._gaps.ranks[group - self._first_learned, age])

    def grow_old(self, now: float) -> None:
        """Move every item to the bin of its age. Call it before victims are chosen, when time has passed or ranks
        were learned."""
        self._queue = None
        for group, age in list(self._heaps):
            if group < self._first_learned or age == AGE_BINS - 1:
                continue
            self._move_older(group, age, now)

    def _move_older(self, group: int, age: int, now: float) -> None:
        heap = self._heaps[group, age]
        until = _EDGES[age + 1]
        for _ in range(_POPS):
            if not heap or now - heap[0][0] < until:
                return
            entry = heapq.heappop(heap)
            if self._number.get(entry[3]) == entry[2]:
                heapq.heappush(self._heaps.setdefault((group, age_bin(now - entry[0])), []), entry)
            else:
                self._entries -= 1
        # Many have aged: a sorted list is a heap, and so is every part of it. Uses come in order, so it nearly is one.
        self._clear_out(heap)
        heap.sort()
        start = 0
        while start < len(heap) and now - heap[start][0] >= until:
            to = age_bin(now - heap[start][0])
            end = _first_younger(heap, start, _EDGES[to], now)
            moved = self._heaps.setdefault((group, to), [])
            in_order = not moved
            moved += heap[start:end]
            if not in_order:
                heapq.heapify(moved)
            start = end
        del heap[:start]

    def pop(self) -> Item | None:
        """Take out the next victim; None when there is none."""
        if self._queue is None:
            self._queue = self._places_by_rank()
        while self._queue:
            # Places of one rank compete by key; nearly always it is one.
            heaps = [heap for place in self._queue[-1] if (heap := self._current(place))]
            if heaps:
                item = heapq.heappop(min(heaps, key=lambda heap: heap[0][:3]))[3]
                self._entries -= 1
                del self._number[item]
                return item
            for place in self._queue.pop():
                self._heaps.pop(place, None)
        return None

    def _places_by_rank(self) -> list[list[tuple[int, int]]]:
        """Places with the same rank together, the least rank last."""
        ranked: dict[Rank, list[tuple[int, int]]] = {}
        for group, age in self._heaps:
            ranked.setdefault(self._rank(group, age), []).append((group, age))
        return [ranked[rank] for rank in sorted(ranked, reverse=True)]

    def _current(self, place: tuple[int, int]) -> list[tuple[float, float, int, Item]]:
        """The heap of a place, without outdated entries at its top."""
        heap = self._heaps.get(place, [])
        popped = 0
        while heap and self._number.get(heap[0][3]) != heap[0][2]:
            if popped == _POPS:
                self._clear_out(heap)
                heapq.heapify(heap)
                break
            heapq.heappop(heap)
            self._entries -= 1
            popped += 1
        return heap

    def _clear_out(self, heap: list[tuple[float, float, int, Item]]) -> None:
        """Drop a list's outdated entries."""
        number = self._number
        current = [entry for entry in heap if number.get(entry[3]) == entry[2]]
        self._entries -= len(heap) - len(current)
        heap[:] = current

    def _rebuild(self) -> None:
        self.rebuilds += 1
        kept = {
            place: [entry for entry in heap if self._number.get(entry[3]) == entry[2]]
            for place, heap in self._heaps.items()
        }
        self._heaps = {place: heap for place, heap in kept.items() if heap}
        self._queue = None
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._entries = len(self._number)
