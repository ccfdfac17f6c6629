"""A workload: the sessions of a trace, their prompts as paths in one static trie of page runs.

The trie holds every page of every prompt and answer once, but not page by page: pages between two points where
some request branches or ends are one node. A collection of 290 MB becomes some ten MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.features import Stop
from radix_cache.simulator.jit import jit
from radix_cache.simulator.layout import FLOW, NONE, REQUEST, ROOT, SESSION, TRIE, Records

Pages = npt.NDArray[np.int64]


class TurnSpec(NamedTuple):
    """One request.

    ``pages``: chained ids of the prompt's full pages, comparable within the session. ``answer``: ids of the pages
    that follow as far as later prompts name them; what the answer fills beyond those nobody will ask for again.
    ``head``: name and length in pages of the beginning that other sessions share; None where nothing is shared.
    """

    prompt_tokens: int
    output_tokens: int
    pages: Pages
    answer: Pages
    think_s: float = 0.0
    service_s: float | None = None
    stop: Stop = Stop.UNKNOWN
    head: tuple[tuple[int, int], int] | None = None


class FlowSpec(NamedTuple):
    """A line of turns. ``spawn_after`` and ``join_before`` are positions in the session's first flow."""

    turns: Sequence[TurnSpec]
    spawn_after: int | None = None
    join_before: int | None = None


@dataclass(frozen=True)
class Workload:
    """Arrays for the simulator; see ``radix_cache.simulator.layout``. Times in seconds, lengths in pages of
    ``page_size`` tokens."""

    page_size: int
    nodes: Records  # TRIE
    requests: Records
    flows: Records
    sessions: Records
    session_ids: tuple[str, ...]
    accesses: int  # pages of all prompts together
    distinct_pages: int

    @cached_property
    def prompt_tokens(self) -> int:
        return int(self.requests["prompt"].sum(dtype=np.int64))

    @cached_property
    def largest_request(self) -> int:
        """Tokens of the longest prompt and answer."""
        return int((self.requests["prompt"] + self.requests["output"]).max())


class _Trie:
    """The static trie while it grows: runs of pages, and the run that each page is in.

    Without compiled code: it would save a tenth of the time that reading a trace takes, and a process that reads
    before it compiles needs its memory one after the other.
    """

    def __init__(self) -> None:
        self._nodes = np.zeros(1024, dtype=TRIE)
        self._nodes[ROOT] = (ROOT, -1, 1, 0)  # so that the root ends at page 0
        self._used = 1
        self._of_page = np.full(1 << 16, NONE, dtype=np.int32)

    @property
    def nodes(self) -> Records:
        """TRIE records, the root first; levels are not known yet."""
        return self._nodes[: self._used]

    def insert(self, path: Pages, ends: Sequence[int], pages: int) -> list[int]:
        """Insert a path of chained page numbers below ``pages``, cut it at ``ends`` (lengths in pages) and return the
        nodes that end there."""
        if pages > len(self._of_page):
            old = len(self._of_page)
            self._of_page.resize(max(old + old // 4, pages), refcheck=False)
            self._of_page[old:] = NONE
        if self._used + 2 * len(ends) + 2 > len(self._nodes):
            self._nodes.resize(2 * len(self._nodes), refcheck=False)
        known = self._known(path)
        if known < len(path):
            parent = self._cut(path, known) if known else ROOT
            self._nodes[self._used] = (parent, known, len(path) - known, 0)
            self._of_page[path[known:]] = self._used
            self._used += 1
        return [self._cut(path, end) if end else ROOT for end in ends]

    def _known(self, path: Pages) -> int:
        """How many pages of a path are in the trie: ids are chained, so a known page has known ancestors."""
        low, high = 0, len(path)
        while low < high:
            middle = (low + high) // 2
            if self._of_page[path[middle]] == NONE:
                high = middle
            else:
                low = middle + 1
        return low

    def _cut(self, path: Pages, at: int) -> int:
        """The node that ends ``at`` pages from the root. Where a node is cut, its lower part keeps its number, so that
        ends stay valid."""
        node = int(self._of_page[path[at - 1]])
        n = self._nodes[node]
        start = int(n["start"])
        if start + int(n["length"]) == at:
            return node
        new = self._used
        self._used += 1
        self._nodes[new] = (n["parent"], start, at - start, 0)
        n["parent"], n["start"] = new, at
        n["length"] -= at - start
        self._of_page[path[start:at]] = new
        return new


@jit
def _finish_nodes(nodes: Any, by_start: Any, requests: Any, users: Any) -> None:
    """Levels, and for each request the deepest node that another flow uses too. ``users``: NONE for each node."""
    several = -2
    for i in range(1, len(by_start)):
        node = by_start[i]
        nodes[node].level = nodes[nodes[node].parent].level + 1
    for i in range(len(requests)):
        node = requests[i].end
        flow = requests[i].flow
        while node != ROOT and users[node] != flow and users[node] != several:
            users[node] = flow if users[node] == NONE else several
            node = nodes[node].parent
    for i in range(len(requests)):
        node = requests[i].end
        while node != ROOT and users[node] != several:
            node = nodes[node].parent
        requests[i].head = node


class WorkloadBuilder:
    """Collects sessions one by one; keeps nothing of a session but its runs of pages.

    Args:
        page_size: tokens per page.
        global_ids: page ids mean the same in all sessions.
        numbered: the same, and ids are numbers below this already, given without gaps: no table of them is kept.
            Heads cannot be shared beyond what the numbers say.
    """

    def __init__(self, page_size: int, *, global_ids: bool = False, numbered: int | None = None) -> None:
        if page_size < 1:
            raise ValueError(f"the page size must be at least 1 token, got {page_size}")
        self.page_size = page_size
        self._global = global_ids
        self._trie = _Trie()
        self._numbered = numbered is not None
        self._pages = numbered or 0
        self._numbers: dict[int, int] = {}
        self._heads: dict[tuple[int, int], list[int]] = {}
        self._requests = np.zeros(1024, dtype=REQUEST)
        self._count = 0
        self._flows: list[tuple[Any, ...]] = []
        self._sessions: list[tuple[int, int]] = []
        self._ids: list[str] = []
        self._accesses = 0

    def add(self, session_id: str, flows: Sequence[FlowSpec]) -> None:
        """Add a session; its first flow is the main one.

        Raises:
            ValueError: a prompt without its page ids, or a flow without turns.
        """
        numbers: dict[int, int] = self._numbers if self._global else {}
        first_flow = len(self._flows)
        main_first = self._count
        joins = [0] * len(flows[0].turns)
        for flow in flows[1:]:
            if flow.join_before is not None:
                joins[flow.join_before] += 1
        for position, flow in enumerate(flows):
            if not flow.turns:
                raise ValueError(f"session {session_id}: flow {position} has no turns")
            first = self._count
            spawn = NONE if position == 0 or flow.spawn_after is None else main_first + flow.spawn_after
            join = NONE if position == 0 or flow.join_before is None else main_first + flow.join_before
            self._flows.append((len(self._sessions), first, spawn, join))
            self._add_flow(session_id, flow, joins if position == 0 else None, numbers)
        self._sessions.append((first_flow, len(flows)))
        self._ids.append(session_id)

    def build(self) -> Workload:
        """The finished workload.

        Raises:
            ValueError: nothing was added.
        """
        if not self._count:
            raise ValueError("a workload needs at least one session")
        return finished(
            self.page_size,
            self._trie.nodes.copy(),
            self._requests[: self._count].copy(),
            flows=dict(zip(["session", "first", "spawn", "join"], zip(*self._flows, strict=True), strict=True)),
            sessions=dict(zip(["first_flow", "flows"], zip(*self._sessions, strict=True), strict=True)),
            session_ids=tuple(self._ids),
            accesses=self._accesses,
        )

    def _add_flow(self, session_id: str, flow: FlowSpec, joins: list[int] | None, numbers: dict[int, int]) -> None:
        first = self._count
        known = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        for k, turn in enumerate(flow.turns):
            pages = turn.prompt_tokens // self.page_size
            if turn.prompt_tokens < 1 or turn.output_tokens < 0 or len(turn.pages) != pages:
                raise ValueError(
                    f"session {session_id}, turn {k}: a prompt of {turn.prompt_tokens} tokens (>= 1) has {pages} full "
                    f"pages of {self.page_size}; got {len(turn.pages)} ids and {turn.output_tokens} output tokens"
                )
            # The last generated token's KV is never computed.
            kv = (turn.prompt_tokens + max(turn.output_tokens - 1, 0)) // self.page_size
            ids = np.concatenate((turn.pages, turn.answer[: max(kv - pages, 0)]))
            if turn.head is not None and not self._numbered:
                self._share_head(ids, turn.head, numbers)
            path = self._number(ids, known, numbers)
            known = (ids, path)
            ends = [pages, (turn.prompt_tokens - 1) // self.page_size, kv]
            end, cap, answer_end = self._trie.insert(self._lengthened(path, kv), ends, self._pages)
            if self._count == len(self._requests):
                self._requests.resize(2 * self._count, refcheck=False)
            self._requests[self._count] = (
                len(self._flows) - 1,
                first + k + 1 if k + 1 < len(flow.turns) else NONE,
                turn.prompt_tokens,
                turn.output_tokens,
                end,
                cap,
                answer_end,
                ROOT,  # head: known when all requests are
                0 if joins is None else joins[k],
                int(turn.stop),
                turn.think_s,
                np.nan if turn.service_s is None else turn.service_s,
            )
            self._count += 1
            self._accesses += pages

    def _fresh(self, count: int) -> npt.NDArray[np.int64]:
        fresh = np.arange(self._pages, self._pages + count)
        self._pages += count
        return fresh

    def _share_head(self, ids: Pages, head: tuple[tuple[int, int], int], numbers: dict[int, int]) -> None:
        """Give the first pages of a prompt the numbers that other sessions use for the same head."""
        name, length = head
        shared = self._heads.setdefault(name, [])
        if len(shared) < length:
            shared.extend(self._fresh(length - len(shared)).tolist())
        if length == 0 or numbers.get(int(ids[length - 1])) == shared[length - 1]:
            return
        for page, number in zip(ids[:length].tolist(), shared, strict=False):
            if numbers.setdefault(page, number) != number:
                return  # the session knows this page from another head; its children cannot be ours

    def _number(self, ids: Pages, known: tuple[Pages, Pages], numbers: dict[int, int]) -> Pages:
        """Page numbers, unique in the workload. ``known``: ids and numbers of the flow's previous path."""
        if self._numbered:
            return ids
        low, high = 0, min(len(ids), len(known[0]))
        while low < high:
            middle = (low + high) // 2
            if ids[middle] == known[0][middle]:
                low = middle + 1
            else:
                high = middle
        same = low
        high = len(ids)
        while low < high:  # ids are chained: a known page has known ancestors
            middle = (low + high) // 2
            if int(ids[middle]) in numbers:
                low = middle + 1
            else:
                high = middle
        path = np.empty(len(ids), dtype=np.int64)
        path[:same] = known[1][:same]
        path[same:low] = [numbers[page] for page in ids[same:low].tolist()]
        path[low:] = self._fresh(len(ids) - low)
        numbers.update(zip(ids[low:].tolist(), path[low:].tolist(), strict=True))
        return path

    def _lengthened(self, path: Pages, length: int) -> Pages:
        """A path with pages that nobody will ask for again, where the answer is longer than what is known."""
        if len(path) >= length:
            return path
        return np.concatenate((path, self._fresh(length - len(path))))


def finished(
    page_size: int,
    nodes: Records,
    requests: Records,
    *,
    flows: Mapping[str, Any],
    sessions: Mapping[str, Any],
    session_ids: tuple[str, ...],
    accesses: int,
) -> Workload:
    """A workload of a whole trie without levels, requests without heads, and columns of flows and sessions."""
    flow_records = np.zeros(len(flows["session"]), dtype=FLOW)
    for name, column in flows.items():
        flow_records[name] = column
    flow_records["last_end"] = flow_records["held"] = flow_records["newest"] = NONE
    flow_records["pace"] = -1.0
    session_records = np.zeros(len(session_ids), dtype=SESSION)
    for name, column in sessions.items():
        session_records[name] = column
    by_start = np.argsort(nodes["start"], kind="stable").astype(np.int64)
    _finish_nodes(nodes, by_start, requests, np.full(len(nodes), NONE, dtype=np.int32))
    return Workload(
        page_size,
        nodes,
        requests,
        flow_records,
        session_records,
        session_ids,
        accesses,
        int(nodes["length"][1:].sum(dtype=np.int64)),
    )
