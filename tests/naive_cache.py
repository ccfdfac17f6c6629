"""A cache that keeps every page as an object and looks at all of them for each victim.

The yardstick for the simulator: no runs of pages, no heaps, no inheritance of last uses, no compiled code. It is
told *when* requests arrive, start and end (the simulator's own event order), and decides by itself what hits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from radix_cache.eviction import EvictionPolicy
from radix_cache.features import FlowState, NodeFeatures
from radix_cache.gaps import AGE_EDGES, SHARED_GAPS, GapTable, age_bin, gap_row, new_pace
from radix_cache.simulator import FlowSpec, TurnSpec

Path = list[Hashable]

_NOTHING_SEEN = GapTable()  # its first ranks take longer than a small trace


@dataclass
class Page:
    name: Hashable
    parent: Page | None
    depth: int
    inserted: float
    seen: float
    users: set[int] = field(default_factory=set)
    device_children: int = 0
    host_children: int = 0
    pins: int = 0
    in_host: bool = False
    joined: Page | None = None  # child that belongs to the same radix node
    hits: int = 0
    time: float = 0.0
    stamp: int = 0
    owner: int = -1
    used_by: int = -1
    context: int = 0
    stop: int = 0
    pace: float = -1.0
    superseded: bool = False


@dataclass
class Request:
    flow: int
    turn: TurnSpec
    prompt: Path
    answer: Path
    last: bool
    first: bool


@dataclass
class FlowNow:
    stop: int = 0
    pace: float = -1.0
    context: int = 0
    state: int = FlowState.LIVE
    last_done: float = 0.0
    path: Path = field(default_factory=list)
    newest: int = -1


class NaiveCache:
    """See the module. All capacities in pages."""

    def __init__(
        self,
        sessions: Sequence[Sequence[FlowSpec]],
        page: int,
        capacity: int,
        policy: EvictionPolicy,
        *,
        truncate: bool = True,
        insert_output: bool = True,
        spare: int = 0,
        host_capacity: int = 0,
        host_policy: EvictionPolicy | None = None,
        host_takes_all: bool = False,
        known_order: Sequence[int] = (),
        elapsed: Sequence[float] = (),
        expected: Sequence[float] = (),
        global_ids: bool = False,
    ) -> None:
        self.page, self.capacity, self.policy = page, capacity, policy
        self.truncate, self.insert_output, self.spare = truncate, insert_output, spare
        self.host_capacity, self.host_policy, self.host_takes_all = host_capacity, host_policy, host_takes_all
        self.gaps = copy.deepcopy(_NOTHING_SEEN)
        self.requests: list[Request] = []
        self.flows: list[FlowNow] = []
        self.pages: dict[Hashable, Page] = {}  # on the device
        self.host: dict[Hashable, Page] = {}
        self.running: dict[int, int] = {}  # request -> pages held outside the tree
        self.started: set[int] = set()
        self.starts: dict[int, float] = {}
        self.hits: dict[int, int] = {}
        self.host_hits: dict[int, int] = {}
        self.stamp = 0
        self.now = 0.0
        for number, flows in enumerate(sessions):
            for flow in flows:
                self._read_flow(0 if global_ids else number, flow)
        self.order, self.elapsed, self.expected = list(known_order), elapsed, expected

    def _read_flow(self, session: int, flow: FlowSpec) -> None:
        self.flows.append(FlowNow())
        for k, turn in enumerate(flow.turns):
            prompt: Path = [(session, int(i)) for i in turn.pages]
            kv = (turn.prompt_tokens + max(turn.output_tokens - 1, 0)) // self.page
            answer: Path = [(session, int(i)) for i in turn.answer][: max(kv - len(prompt), 0)]
            number = len(self.requests)
            answer += [("nobody", number, i) for i in range(kv - len(prompt) - len(answer))]
            last = k + 1 == len(flow.turns)
            self.requests.append(Request(len(self.flows) - 1, turn, prompt, answer, last, k == 0))

    # -- events ---------------------------------------------------------------------------------------------

    def ready(self, number: int, now: float) -> None:
        request = self.requests[number]
        flow = self.flows[request.flow]
        if not request.first:
            self.gaps.observe(gap_row(flow.stop, flow.pace), now - flow.last_done)
            flow.pace = new_pace(flow.pace, age_bin(now - flow.last_done, AGE_EDGES))

    def start(self, number: int, now: float) -> None:
        self.now, self.stamp = now, self.stamp + 1
        request = self.requests[number]
        turn, flow = request.turn, self.flows[request.flow]
        total = -(-(turn.prompt_tokens + turn.output_tokens) // self.page)
        self.started.add(number)
        self.starts[number] = now
        self.hits[number] = self.host_hits[number] = 0
        if total > self.capacity:
            return
        limit = (turn.prompt_tokens - 1) // self.page
        matched = self._resident(request.prompt[:limit])
        flow.context, flow.newest = turn.prompt_tokens + turn.output_tokens, number
        self._learn_shared_use(request)
        for page in [*self.pages.values(), *self.host.values()]:
            if page.users == {request.flow} and page.name in [*flow.path, *request.prompt]:
                page.superseded = page.name not in request.prompt
        if matched:
            matched[-1].pins += 1
            self._cut(matched[-1])
        need, spare = total - len(matched), self.spare
        held = sum(self.running.values())
        while (free := self.capacity - len(self.pages) - held) < need + spare:
            if free >= need and not self._evictable():
                spare = free - need
                break
            self._evict()
        if matched:
            matched[-1].pins -= 1
        for name in request.prompt[len(matched) : limit]:
            if name not in self.host:
                break
            self.host_hits[number] += self.page
        self.hits[number] = len(matched) * self.page
        for page in matched:
            page.hits += 1
        before = len(self.pages)
        self._insert(request.prompt, number)
        self.running[number] = need + spare - (len(self.pages) - before)
        if request.prompt:
            self.pages[request.prompt[-1]].pins += 1
        flow.path = request.prompt

    def done(self, number: int, now: float) -> None:
        self.now, self.stamp = now, self.stamp + 1
        request = self.requests[number]
        flow = self.flows[request.flow]
        flow.stop, flow.last_done = int(request.turn.stop), now
        if request.last:
            flow.state = FlowState.ENDED
        if number not in self.running:
            return
        del self.running[number]
        path = request.prompt
        if self.insert_output:
            path = request.prompt + request.answer
            self._insert(path, number)
            for name in path:  # the answer may lead back to a branch that the flow had abandoned
                self.pages[name].superseded = False
        else:
            self._use(path, number)
        if request.prompt:
            self.pages[request.prompt[-1]].pins -= 1
        flow.path = path

    # -- the tree -------------------------------------------------------------------------------------------

    def _resident(self, path: Path) -> list[Page]:
        found = []
        for name in path:
            if name not in self.pages:
                break
            found.append(self.pages[name])
        return found

    def _insert(self, path: Path, number: int) -> None:
        flow = self.requests[number].flow
        resident = self._resident(path)
        parent = resident[-1] if resident else None
        if parent is not None:
            self._cut(parent)
        new_parent = parent
        for depth, name in enumerate(path[len(resident) :], start=len(resident) + 1):
            if name in self.host:
                self._leave_host(self.host[name])
            # A page that comes back starts anew; only what hangs below it in the host tier stays.
            page = Page(name, parent, depth, self.now, self.now, {flow})
            page.host_children = sum(1 for p in self.host.values() if p.parent is not None and p.parent.name == name)
            for p in self.host.values():
                if p.parent is not None and p.parent.name == name:
                    p.parent = page
            self.pages[name] = page
            if parent is not None:
                parent.device_children += 1
                if parent is not new_parent:
                    parent.joined = page
            parent = page
        if path:
            self._cut(self.pages[path[-1]])
        self._use(path, number)

    def _cut(self, page: Page) -> None:
        """A radix node ends here. Where whole nodes go, its tail then looks used now, as in SGLang."""
        below, page.joined = page.joined, None
        while below is not None and not self.truncate:
            below.time, below.stamp = self.now, self.stamp
            below = below.joined

    def _use(self, path: Path, number: int) -> None:
        flow = self.requests[number].flow
        for name in path:
            page = self.pages[name]
            page.time, page.stamp, page.owner, page.used_by = self.now, self.stamp, flow, number
            page.context, page.stop = self.flows[flow].context, self.flows[flow].stop
            page.pace = self.flows[flow].pace
            if flow not in page.users:
                page.users.add(flow)
                page.superseded = False

    def _learn_shared_use(self, request: Request) -> None:
        resident = self._resident(request.prompt)
        for page in reversed(resident):
            if page.users != {request.flow}:
                self.gaps.observe(SHARED_GAPS, self.now - page.seen)
                break
        for page in resident:
            page.seen = self.now

    def _radix_node(self, leaf: Page) -> list[Page]:
        node = [leaf]
        while node[-1].parent is not None and node[-1].parent.joined is node[-1]:
            node.append(node[-1].parent)
        return node

    def _score(self, policy: EvictionPolicy, page: Page, size: int) -> tuple[float, float, int]:
        f = NodeFeatures(
            now=self.now,
            last_access=page.time,
            stop=page.stop,
            pace=page.pace,
            state=self.flows[page.owner].state,
            superseded=float(page.superseded),
            sharers=min(len(page.users), 2),
            depth=page.depth * self.page,
            size=size * self.page,
            context=page.context,
            hits=page.hits,
            inserted=page.inserted,
            next_use=self._next_use(page),
        )
        group = policy.group(f)
        rank = float(group)
        if policy.learned_groups:
            rank -= policy.groups
            if group in policy.learned_groups:
                row = group - policy.learned_groups[0]
                rank = self.gaps.ranks[row, age_bin(self.now - page.time, AGE_EDGES)]
        return rank, policy.key(f), page.stamp

    def _next_use(self, page: Page) -> float:
        for number in self.order[self.order.index(page.used_by) + 1 :] if page.used_by in self.order else []:
            request = self.requests[number]
            limit = (request.turn.prompt_tokens - 1) // self.page
            if number not in self.started and page.name in request.prompt[:limit]:
                newest = self.flows[request.flow].newest
                if newest < 0:
                    return self.expected[number]
                return self.starts[newest] + self.elapsed[number] - self.elapsed[newest]
        return math.inf

    def _evictable(self) -> list[Page]:
        return [p for p in self.pages.values() if not p.device_children and not p.pins]

    def _evict(self) -> None:
        victim = min(
            self._evictable(),
            key=lambda p: self._score(self.policy, p, 1 if self.truncate else len(self._radix_node(p))),
        )
        for page in [victim] if self.truncate else self._radix_node(victim):
            assert not page.pins, "a running request lost a page"
            del self.pages[page.name]
            if page.parent is not None:
                page.parent.device_children -= 1
                if page.parent.joined is page:
                    page.parent.joined = None
            if self.host_capacity and self._worth_hosting(page):
                self.host[page.name] = page
                if page.parent is not None:
                    page.parent.host_children += 1
                self._shrink_host()

    def _worth_hosting(self, page: Page) -> bool:
        """Whether somebody may ask for a page again, or for one below it that is in the host tier."""
        ended = self.flows[page.owner].state == FlowState.ENDED
        lost = len(page.users) < 2 and (page.superseded or ended)
        return self.host_takes_all or page.host_children > 0 or not lost

    def _leave_host(self, page: Page) -> None:
        del self.host[page.name]
        if page.parent is not None:
            page.parent.host_children -= 1

    def _shrink_host(self) -> None:
        assert self.host_policy is not None
        policy = self.host_policy
        while len(self.host) > self.host_capacity:
            leaves = [p for p in self.host.values() if not p.host_children]
            self._leave_host(min(leaves, key=lambda p: self._score(policy, p, 1)))
