"""Attribution of a simulated run: the simulator's own order of events, replayed on page numbers. Exact.

The chain begins at the page-aligned level, since a workload knows whole pages only: ``ideal`` of an attribution here is
what an infinite cache of whole pages would hit, prompts inserted when their request is ready, answers when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from radix_cache.attribution.causes import Cause, Loss
from radix_cache.attribution.levels import Attribution, CacheKind, Lengths, attribute
from radix_cache.attribution.pages import DEVICE, HOST, Ranges, as_ranges, head, length, numbers
from radix_cache.attribution.sweep import Asked, Sweep
from radix_cache.features import Stop
from radix_cache.simulator.evictions import HOST as LOG_HOST
from radix_cache.simulator.evictions import SPLIT
from radix_cache.simulator.layout import NONE, REJECTED, ROOT
from radix_cache.simulator.run import Outcome
from radix_cache.simulator.workload import Workload

_READY, _START, _DONE = 0, 1, 2


def explain(workload: Workload, outcome: Outcome) -> list[Attribution]:
    """Causes for each request of a simulated run; ``Loss.culprit`` is an index into the workload's requests.

    Args:
        workload: what was played.
        outcome: of ``simulate(workload, ..., log_evictions=True)``.

    Raises:
        ValueError: the run evicted without a log, or had a write-through host tier, which keeps no log.
    """
    if outcome.setting.write_through and outcome.setting.host_capacity:
        raise ValueError("a write-through host tier keeps no log of what it drops; simulate one of victims instead")
    if outcome.evictions and not len(outcome.log):
        raise ValueError("the run kept no log of its evictions; simulate it with log_evictions=True")
    return Replayed(workload, outcome).run()


class Replayed:
    """A simulated run on page numbers; see ``explain``."""

    def __init__(self, workload: Workload, outcome: Outcome) -> None:
        self._page = workload.page_size
        self._requests: Any = workload.requests
        self._fates: Any = outcome.fates
        self._log: Any = outcome.log
        self._insert_output = outcome.setting.insert_output
        self._host = outcome.setting.host_capacity > 0
        self._pages = PageNumbers(workload, outcome.log)
        self._end = [self._pages.path(int(node)) for node in self._requests["end"]]
        self._kv = [self._pages.path(int(node)) for node in self._requests["kv"]]
        self._cap = [int(n["start"] + n["length"]) for n in workload.nodes[self._requests["cap"]]]
        self.sweep = Sweep(self._asked(workload), self._pages.count)
        self._promised = np.zeros(self._pages.count, dtype=np.bool_)
        self._best = [0] * len(self._requests)
        self._gains: dict[int, Loss] = {}
        self._by_request: dict[int, list[Any]] | None = None

    def run(self) -> list[Attribution]:
        logged = 0
        for kind, request in self._order():
            if kind == _READY:
                self._best[request] = self._known(request)
                self._promise(self._end[request])
                self.sweep.arrive(request)
            elif kind == _START:
                stamp = self._fates[request]["start_stamp"]
                while logged < len(self._log) and self._log[logged]["stamp"] <= stamp:
                    self._left(self._log[logged])
                    logged += 1
                self._start(request)
            else:
                if self._fates[request]["status"] != REJECTED and self._insert_output:
                    self._store(self._kv[request])
                self._promise(self._kv[request])
                self.sweep.end(request)
        return [self._attribution(request) for request in range(len(self._requests))]

    def paths(self, request: int) -> tuple[Ranges, Ranges]:
        """Pages of a request's prompt, and those that its answer adds."""
        prompt = self._end[request]
        return prompt, _after(self._kv[request], length(prompt))

    def evictions(self, request: int) -> list[tuple[Literal["remove"], int, tuple[tuple[int, int], ...]]]:
        """What left the cache for a request, in order, as operations of ``traces.replay.events``."""
        if self._by_request is None:
            self._by_request = {}
            for entry in self._log[self._log["kind"] != SPLIT]:
                self._by_request.setdefault(int(entry["request"]), []).append(entry)
        found: list[tuple[Literal["remove"], int, tuple[tuple[int, int], ...]]] = []
        for entry in self._by_request.get(request, ()):
            ((first, count),) = self._piece(entry).tolist()
            found.append(("remove", HOST if entry["kind"] == LOG_HOST else DEVICE, ((first, count),)))
        return found

    def _order(self) -> Iterator[tuple[int, int]]:
        """(what, request) in the order of the simulator's stamps."""
        count = len(self._fates)
        stamps = np.concatenate([self._fates[name] for name in ("ready_stamp", "start_stamp", "done_stamp")])
        for at in np.argsort(stamps, kind="stable").tolist():
            yield divmod(at, count)

    def _start(self, request: int) -> None:
        fate = self._fates[request]
        hit, best = self._hit(request), self._best[request] * self._page
        if hit > best and hit <= self._known(request) * self._page:
            # Others that were ready later have started before it, as when its session was parked.
            self._gains[request] = Loss(Cause.OVERTAKEN, best - hit, best)
        if fate["status"] == REJECTED:
            return
        self.sweep.look_up(request, hit, best, self._page)
        self.sweep.use(request)
        self._store(self._end[request])
        self.sweep.computed(request)

    def _hit(self, request: int) -> int:
        return int(self._fates[request]["hit"] + self._fates[request]["host"])

    def _known(self, request: int) -> int:
        """Pages that an infinite cache would hit now."""
        known = self._promised[numbers(self._end[request], 0, self._cap[request])]
        return int(known.argmin()) if not known.all() else len(known)

    def _promise(self, ranges: Ranges) -> None:
        for first, count in ranges.tolist():
            self._promised[first : first + count] = True

    def _store(self, ranges: Ranges) -> None:
        self.sweep.store(ranges)
        if self._host:  # what comes back to the device leaves the host tier
            self.sweep.state.remove(ranges, NONE, HOST)

    def _left(self, entry: Any) -> None:
        if entry["kind"] == SPLIT:
            return
        ranges = self._piece(entry)
        if entry["kind"] == LOG_HOST:
            self.sweep.evict(ranges, int(entry["request"]), HOST)
            return
        if self._host:
            self.sweep.store(ranges, HOST)
        self.sweep.evict(ranges, int(entry["request"]), DEVICE)

    def _piece(self, entry: Any) -> Ranges:
        return self._pages.piece(int(entry["node"]), int(entry["end"] - entry["pages"]), int(entry["end"]))

    def _attribution(self, request: int) -> Attribution:
        best, hit = self._best[request] * self._page, self._hit(request)
        found = self.sweep.losses(request)
        if request in self._gains:
            found = [self._gains[request]]
        if self._fates[request]["status"] == REJECTED and best:
            found = [Loss(Cause.NOT_ADMITTED, best, 0)]
        lengths = Lengths(int(self._requests[request]["prompt"]), best, best, hit)
        return attribute(lengths, CacheKind(self._page), found)

    def _asked(self, workload: Workload) -> list[Asked]:
        flows, sessions = workload.flows, workload.sessions
        first_flow = sessions["first_flow"][flows["session"]]
        asked = []
        for number, request in enumerate(self._requests):
            flow = int(request["flow"])
            main = flow == first_flow[flow]
            prompt = self._end[number]
            whole = self._kv[number]
            asked.append(
                Asked(
                    flow=flow,
                    prompt=prompt,
                    answer=_after(whole, length(prompt)),
                    stop=Stop(int(request["stop"])),
                    opens=bool(main and flows[flow]["first"] == number),
                    subagent=not main,
                )
            )
        return asked


class PageNumbers:
    """Numbers for the pages of a workload's trie: depth first, so that a line of nodes is one range."""

    def __init__(self, workload: Workload, log: Any) -> None:
        nodes: Any = workload.nodes
        self._parent = nodes["parent"].astype(np.int64)
        self._start = nodes["start"].astype(np.int64)
        self._length = nodes["length"].astype(np.int64)
        self._base = _depth_first(self._parent, self._length)
        self.count = int(self._length[1:].sum())
        self._origin: dict[int, int] = {}
        for entry in log[log["kind"] == SPLIT] if len(log) else ():
            node, head_ = int(entry["node"]), int(entry["request"])
            self._origin[head_] = self._origin.get(node, node)
        self._paths: dict[int, Ranges] = {ROOT: as_ranges([])}

    def path(self, node: int) -> Ranges:
        """Pages from the root to the end of a node of the workload."""
        above = []
        while node not in self._paths:
            above.append(node)
            node = int(self._parent[node])
        for below in reversed(above):
            ranges = self._paths[node]
            first, count = int(self._base[below]), int(self._length[below])
            if len(ranges) and ranges[-1].sum() == first:
                ranges = ranges.copy()
                ranges[-1, 1] += count
            elif count:
                ranges = np.concatenate((ranges, as_ranges([(first, count)])))
            self._paths[below] = ranges
            node = below
        return self._paths[node]

    def piece(self, node: int, start: int, end: int) -> Ranges:
        """Pages ``start`` to ``end``, counted from the root, that a node of the cache holds."""
        origin = self._origin.get(node, node)
        return as_ranges([(int(self._base[origin] + start - self._start[origin]), end - start)])


def _depth_first(parent: npt.NDArray[np.int64], length_: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """First page number of each node; a node's first child goes on where it ends."""
    children: list[list[int]] = [[] for _ in parent]
    for node in range(len(parent) - 1, 0, -1):
        children[int(parent[node])].append(node)
    base = np.zeros(len(parent), dtype=np.int64)
    at, stack = 0, children[ROOT][:]
    while stack:
        node = stack.pop()
        base[node] = at
        at += int(length_[node])
        stack += children[node]
    return base


def _after(ranges: Ranges, pages: int) -> Ranges:
    """A path without its first pages."""
    kept = head(ranges, pages)
    if length(kept) == length(ranges):
        return as_ranges([])
    rest = ranges[max(len(kept) - 1, 0) :].copy()
    if len(kept):
        cut = int(kept[-1, 1])
        rest[0, 0] += cut
        rest[0, 1] -= cut
    return rest[rest[:, 1] > 0]
