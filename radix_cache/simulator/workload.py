"""A workload: the sessions of a trace, their prompts as paths in one static trie of page runs.

The trie holds every page of every prompt and answer once, but not page by page: pages between two points where
some request branches or ends are one node. A collection of 290 MB becomes some ten MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.features import Stop
from radix_cache.simulator.jit import jit
from radix_cache.simulator.layout import FLOW, NODE, NONE, REQUEST, ROOT, SESSION, TRIE, Records

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
    nodes: Records
    requests: Records
    flows: Records
    sessions: Records
    session_ids: tuple[str, ...]
    accesses: int  # pages of all prompts together
    distinct_pages: int

    @property
    def prompt_tokens(self) -> int:
        return int(self.requests["prompt"].sum(dtype=np.int64))

    @cached_property
    def trie(self) -> Records:
        """The nodes without their state, TRIE records: what walks over many nodes reads less of."""
        trie = np.empty(len(self.nodes), dtype=TRIE)
        for name in TRIE.names or ():
            trie[name] = self.nodes[name]
        return trie


@jit
def _split(nodes: Any, of_page: Any, path: Any, node: int, at: int, new: int) -> None:
    """Cut a node at ``at`` pages from the root; the lower part keeps its number, so that ends stay valid."""
    nodes[new].parent = nodes[node].parent
    nodes[new].start = nodes[node].start
    nodes[new].length = at - nodes[node].start
    nodes[node].parent = new
    nodes[node].length -= nodes[new].length
    nodes[node].start = at
    for k in range(nodes[new].start, at):
        of_page[path[k]] = new


@jit
def _add_path(nodes: Any, used: int, of_page: Any, path: Any, ends: Any, found: Any) -> int:
    """Insert a path of chained page numbers, cut it at ``ends`` and report the nodes that end there.

    Room for ``1 + 2 * len(ends)`` more nodes must be there. Returns the number of nodes in use.
    """
    low, high = 0, len(path)
    while low < high:  # ids are chained: a known page has known ancestors
        middle = (low + high) // 2
        if of_page[path[middle]] == NONE:
            high = middle
        else:
            low = middle + 1
    if low < len(path):
        parent = ROOT
        if low > 0:
            parent = of_page[path[low - 1]]
            if nodes[parent].start + nodes[parent].length > low:
                _split(nodes, of_page, path, parent, low, used)
                parent = used
                used += 1
        nodes[used].parent = parent
        nodes[used].start = low
        nodes[used].length = len(path) - low
        for k in range(low, len(path)):
            of_page[path[k]] = used
        used += 1
    for k in range(len(ends)):
        at = ends[k]
        if at == 0:
            found[k] = ROOT
            continue
        node = of_page[path[at - 1]]
        if nodes[node].start + nodes[node].length > at:
            _split(nodes, of_page, path, node, at, used)
            node = used
            used += 1
        found[k] = node
    return used


@jit
def _finish_nodes(nodes: Any, by_start: Any, requests: Any) -> None:
    """Levels, and for each request the deepest node that another flow uses too."""
    for i in range(1, len(by_start)):
        node = by_start[i]
        nodes[node].level = nodes[nodes[node].parent].level + 1
    for i in range(len(requests)):
        node = requests[i].end
        flow = requests[i].flow
        while node != ROOT and nodes[node].first != flow and nodes[node].shared == 0:
            if nodes[node].first == NONE:
                nodes[node].first = flow
            else:
                nodes[node].shared = 1
            node = nodes[node].parent
    for i in range(len(requests)):
        node = requests[i].end
        while node != ROOT and nodes[node].shared == 0:
            node = nodes[node].parent
        requests[i].head = node
    for i in range(len(nodes)):
        nodes[i].first = NONE
        nodes[i].shared = 0


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
        self._nodes = np.zeros(1024, dtype=NODE)
        self._used = 1
        self._of_page = np.full(1 << 16, NONE, dtype=np.int32)
        self._numbered = numbered is not None
        self._pages = numbered or 0
        self._numbers: dict[int, int] = {}
        self._heads: dict[tuple[int, int], list[int]] = {}
        self._requests: list[tuple[Any, ...]] = []
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
        main_first = len(self._requests)
        joins = [0] * len(flows[0].turns)
        for flow in flows[1:]:
            if flow.join_before is not None:
                joins[flow.join_before] += 1
        for position, flow in enumerate(flows):
            if not flow.turns:
                raise ValueError(f"session {session_id}: flow {position} has no turns")
            first = len(self._requests)
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
        if not self._requests:
            raise ValueError("a workload needs at least one session")
        nodes = self._nodes[: self._used].copy()
        nodes["owner"] = nodes["first"] = nodes["used_by"] = nodes["joined"] = NONE
        nodes[ROOT]["parent"], nodes[ROOT]["start"] = ROOT, -1
        nodes[ROOT]["length"] = nodes[ROOT]["resident"] = 1  # so that start + resident is 0
        requests = np.zeros(len(self._requests), dtype=REQUEST)
        fields = ["flow", "next", "prompt", "output", "end", "cap", "kv", "joins", "stop", "think", "service"]
        for name, column in zip(fields, zip(*self._requests, strict=True), strict=True):
            requests[name] = column
        flows = np.zeros(len(self._flows), dtype=FLOW)
        for name, column in zip(["session", "first", "spawn", "join"], zip(*self._flows, strict=True), strict=True):
            flows[name] = column
        flows["last_end"] = flows["held"] = flows["newest"] = NONE
        flows["pace"] = -1.0
        sessions = np.zeros(len(self._sessions), dtype=SESSION)
        sessions["first_flow"], sessions["flows"] = zip(*self._sessions, strict=True)
        by_start = np.argsort(nodes["start"], kind="stable").astype(np.int64)
        _finish_nodes(nodes, by_start, requests)
        return Workload(
            self.page_size,
            nodes,
            requests,
            flows,
            sessions,
            tuple(self._ids),
            self._accesses,
            int(nodes["length"][1:].sum(dtype=np.int64)),
        )

    def _add_flow(self, session_id: str, flow: FlowSpec, joins: list[int] | None, numbers: dict[int, int]) -> None:
        first = len(self._requests)
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
            end, cap, answer_end = self._insert(self._lengthened(path, kv), ends)
            self._requests.append(
                (
                    len(self._flows) - 1,
                    first + k + 1 if k + 1 < len(flow.turns) else NONE,
                    turn.prompt_tokens,
                    turn.output_tokens,
                    end,
                    cap,
                    answer_end,
                    0 if joins is None else joins[k],
                    int(turn.stop),
                    turn.think_s,
                    np.nan if turn.service_s is None else turn.service_s,
                )
            )
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
        path = np.empty(len(ids), dtype=np.int64)
        path[:low] = known[1][:low]
        for k, page in enumerate(ids[low:].tolist(), start=low):
            number = numbers.get(page)
            if number is None:
                number = numbers[page] = self._pages
                self._pages += 1
            path[k] = number
        return path

    def _lengthened(self, path: Pages, length: int) -> Pages:
        """A path with pages that nobody will ask for again, where the answer is longer than what is known."""
        if len(path) >= length:
            return path
        return np.concatenate((path, self._fresh(length - len(path))))

    def _insert(self, path: Pages, ends: list[int]) -> tuple[int, int, int]:
        if self._pages > len(self._of_page):
            grown = np.full(max(2 * len(self._of_page), self._pages), NONE, dtype=np.int32)
            grown[: len(self._of_page)] = self._of_page
            self._of_page = grown
        if self._used + 8 > len(self._nodes):
            self._nodes = np.concatenate((self._nodes, np.zeros(len(self._nodes), dtype=NODE)))
        found = np.empty(3, dtype=np.int64)
        self._used = _add_path(self._nodes, self._used, self._of_page, path, np.array(ends, dtype=np.int64), found)
        return int(found[0]), int(found[1]), int(found[2])
