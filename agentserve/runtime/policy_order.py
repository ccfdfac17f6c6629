"""Victim order of a live cache: the same order as the simulator's, kept as lists that are mended, not rebuilt.

SGLang scores every leaf anew at each eviction. Here a leaf is scored when it is used. Groups of a fixed rank are
heaps. Where ranks are learned, a group is one list sorted by last access, so that the leaves of an age lie side by
side: nothing is moved when leaves grow older, the borders between ages are looked up when victims are to be chosen.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable, Iterable
from typing import Generic, Protocol, TypeVar

from radix_cache.eviction import EvictionPolicy
from radix_cache.gaps import AGE_BINS, AGE_EDGES, GapTable

Item = TypeVar("Item", bound=Hashable)
Rank = tuple[bool, float]  # (is learned, rank): groups with a fixed rank go before all learned ones
Entry = tuple[float, float, int, Item]  # (key, stamp, number, item); it counts while its number is the item's

_EDGES = [float(edge) for edge in AGE_EDGES]
_SPARE_ENTRIES = 1024  # outdated entries that are always tolerated
_AT_ONCE_FROM = 8  # what adds more than one part in so many is cheaper to put in order as a whole


def age_bin(age: float) -> int:
    """``radix_cache.gaps.age_bin`` on a list: that one is written for compiled code and slow in plain Python."""
    return min(max(bisect_right(_EDGES, age) - 1, 0), AGE_BINS - 1)


class _Source(Protocol[Item]):
    """Where victims of one rank come from."""

    def head(self, current: dict[Item, int]) -> Entry[Item] | None:
        """The first entry that counts; None when there is none."""

    def take(self) -> None:
        """Go past the head."""


class _Heap(Generic[Item]):
    def __init__(self, entries: list[Entry[Item]]) -> None:
        self._entries = entries

    def head(self, current: dict[Item, int]) -> Entry[Item] | None:
        entries = self._entries
        while entries and current.get(entries[0][3]) != entries[0][2]:
            heapq.heappop(entries)
        return entries[0] if entries else None

    def take(self) -> None:
        heapq.heappop(self._entries)


class _Run(Generic[Item]):
    """The entries of one age in a sorted list, from ``start`` to ``end``; those before ``at`` are gone."""

    __slots__ = ("age", "at", "end", "entries", "start")

    def __init__(self, entries: list[Entry[Item]], age: int, start: int, end: int) -> None:
        self.entries = entries
        self.age = age
        self.start = self.at = start
        self.end = end

    def head(self, current: dict[Item, int]) -> Entry[Item] | None:
        for at in range(self.at, self.end):
            entry = self.entries[at]
            if current.get(entry[3]) == entry[2]:
                self.at = at
                return entry
        self.at = self.end
        return None

    def take(self) -> None:
        self.at += 1


class VictimOrder(Generic[Item]):
    """Items ordered by ``(rank of group, key, stamp)``, least first.

    Args:
        policy: says which groups have a learned rank: the last ones, with the last access in seconds as key.
        gaps: learned ranks by (reason to wait, age); read at every choice, never written.
    """

    def __init__(self, policy: EvictionPolicy, gaps: GapTable) -> None:
        self._first_learned = policy.learned_groups[0] if policy.learned_groups else policy.groups
        self._gaps = gaps
        self._heaps: dict[int, list[Entry[Item]]] = {}  # by group of a fixed rank
        self._lines: dict[int, list[Entry[Item]]] = {}  # by group of a learned rank: sorted
        self._number: dict[Item, int] = {}
        self._next = 0
        self._rebuild_at = _SPARE_ENTRIES
        # One walk: what was found out when its first victim was chosen. None: nothing is known.
        self._now = 0.0
        self._queue: list[list[_Source[Item]]] | None = None  # by rank, the least first
        self._at = 0  # the first rank that may have something
        self._places: dict[tuple[int, int], int] = {}  # (group, age) -> where in the queue
        self._runs: dict[int, list[_Run[Item]]] = {}  # of each line, in its order
        self.rebuilds = 0  # times that outdated entries were cleared out

    def __len__(self) -> int:
        return len(self._number)

    def put(self, item: Item, group: int, key: float, stamp: float) -> None:
        """Add an item, or move it to where it belongs now."""
        self.put_all([(item, group, key, stamp)])

    def put_all(self, scored: Iterable[tuple[Item, int, float, float]]) -> None:
        """Add items, given as (item, group, key, stamp), or move them to where they belong now. Many at once cost
        less than one by one."""
        fresh: dict[int, list[Entry[Item]]] = {}
        number = self._next
        for item, group, key, stamp in scored:
            number += 1
            self._number[item] = number
            if group in fresh:
                fresh[group].append((key, stamp, number, item))
            else:
                fresh[group] = [(key, stamp, number, item)]
        self._next = number
        for group, entries in fresh.items():
            if group < self._first_learned:
                self._add_to_heap(group, entries)
            else:
                self._add_to_line(group, entries)
        if number > self._rebuild_at:
            self._rebuild()

    def _add_to_heap(self, group: int, entries: list[Entry[Item]]) -> None:
        heap = self._heaps.get(group)
        if heap is None:
            heap = self._heaps[group] = []
            self._end_walk()
        self._at = min(self._at, self._places.get((group, 0), 0))
        if len(entries) * _AT_ONCE_FROM > len(heap):
            heap += entries
            heapq.heapify(heap)
        else:
            for entry in entries:
                heapq.heappush(heap, entry)

    def _add_to_line(self, group: int, entries: list[Entry[Item]]) -> None:
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = []
        many = len(entries) * _AT_ONCE_FROM > len(line)
        if many and (self._queue is None or len(entries) > _AT_ONCE_FROM):  # to begin a walk anew costs more than a few
            self._end_walk()
            line += entries
            line.sort()
            return
        for entry in entries:
            # The age as this walk sees it, whatever the clock says now: an age is a place in the list.
            if self._queue is not None and not self._make_way(group, entry, age_bin(self._now - entry[0])):
                self._end_walk()
            if not line or entry > line[-1]:
                line.append(entry)
            else:
                insort(line, entry)

    def _make_way(self, group: int, entry: Entry[Item], age: int) -> bool:
        """Let the runs of a walk know that an entry is about to be inserted; false when none has its age."""
        runs = self._runs.get(group, [])
        mine = next((run for run in runs if run.age == age), None)
        if mine is None:
            return False
        mine.at = min(mine.at, bisect_right(mine.entries, entry, mine.start, mine.end))
        mine.end += 1
        self._at = min(self._at, self._places[group, age])
        for run in runs:
            if run.age < age:  # younger ones come later
                run.start += 1
                run.at += 1
                run.end += 1
        return True

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
        """Take every item for as old as it is now. Call it before victims are chosen, when time has passed or ranks
        were learned."""
        self._end_walk()
        self._now = now

    def pop(self) -> Item | None:
        """Take out the next victim; None when there is none."""
        if self._queue is None:
            self._queue = self._begin_walk()
        queue, current = self._queue, self._number
        while self._at < len(queue):
            # Sources of one rank compete by key; nearly always it is one.
            least, source = None, None
            for candidate in queue[self._at]:
                head = candidate.head(current)
                if head is not None and (least is None or head < least):
                    least, source = head, candidate
            if least is not None and source is not None:
                source.take()
                del current[least[3]]
                return least[3]
            self._at += 1
        return None

    def _begin_walk(self) -> list[list[_Source[Item]]]:
        """Sources with the same rank together, the least rank first."""
        ranked: dict[Rank, list[tuple[tuple[int, int], _Source[Item]]]] = {}
        for group, heap in self._heaps.items():
            ranked.setdefault(self._rank(group, 0), []).append(((group, 0), _Heap(heap)))
        for group, line in self._lines.items():
            self._runs[group] = self._runs_of(line)
            for run in self._runs[group]:
                ranked.setdefault(self._rank(group, run.age), []).append(((group, run.age), run))
        queue = [ranked[rank] for rank in sorted(ranked)]
        self._places = {place: at for at, sources in enumerate(queue) for place, _ in sources}
        return [[source for _, source in sources] for sources in queue]

    def _runs_of(self, line: list[Entry[Item]]) -> list[_Run[Item]]:
        now, runs, start = self._now, [], 0
        while start < len(line):
            age = age_bin(now - line[start][0])
            youngest = _EDGES[age]
            end = len(line)
            if age:  # the first bin also holds what is younger than nothing: clocks differ
                end = bisect_left(line, True, start, key=lambda entry: now - entry[0] < youngest)
            runs.append(_Run(line, age, start, end))
            start = end
        return runs

    def _end_walk(self) -> None:
        """Forget the order of sources, and drop what they went past."""
        for runs in self._runs.values():
            for run in reversed(runs):
                del run.entries[run.start : run.at]
        self._runs.clear()
        self._places.clear()
        self._queue = None
        self._at = 0

    def _rebuild(self) -> None:
        """Drop the outdated entries; what is left of a sorted list is sorted."""
        self._end_walk()
        self.rebuilds += 1
        number = self._number
        for entries in (*self._heaps.values(), *self._lines.values()):
            entries[:] = [entry for entry in entries if number.get(entry[3]) == entry[2]]
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._lines = {group: line for group, line in self._lines.items() if line}
        # By the time that as many entries were added as there are items, half may be outdated.
        self._rebuild_at = self._next + len(number) + _SPARE_ENTRIES
