"""From a live run to what the simulator plays: the pages that were really sent, and when everything happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agentserve.runtime.policy_journal import JournalEvent
from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, TurnSpec, Workload, WorkloadBuilder
from radix_cache.simulator.layout import Records
from radix_cache.simulator.recorded import (
    ARRIVE,
    DECODE,
    END,
    EVENT,
    FINISH,
    KEEP,
    MATCH,
    PREFILL,
    RELEASE,
    START,
    STEP,
)
from traces.model import MAIN_FLOW
from traces.replay.clients.base import Tokens, conversation_name
from traces.replay.rebuild import Sent
from traces.replay.record import RunEvent

STOPS = {"tool_use": Stop.TOOL, "end_turn": Stop.TURN, "": Stop.UNKNOWN}


class Played(NamedTuple):
    """A run as the simulator takes it. Requests are numbered by session, flow and turn."""

    workload: Workload
    sent: list[Sent]  # by request
    events: Records  # recorded.EVENT
    held_pages: npt.NDArray[np.int64]  # by request
    steps: Records | None = None  # recorded.STEP, where the server wrote a journal


class _Pages:
    """Numbers for pages of tokens: equal chains of pages have equal numbers."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._numbers: dict[tuple[int, bytes], int] = {}

    def of(self, tokens: Tokens) -> npt.NDArray[np.int64]:
        """Ids of the full pages of a sequence."""
        parent = -1
        ids = []
        for at in range(0, len(tokens) // self._size * self._size, self._size):
            page = (parent, tokens[at : at + self._size].tobytes())
            parent = self._numbers.setdefault(page, len(self._numbers))
            ids.append(parent)
        return np.array(ids, dtype=np.int64)


def played_run(
    sent: Sequence[Sent],
    events: Iterable[RunEvent],
    page_size: int,
    *,
    told: bool,
    journal: Iterable[JournalEvent] | None = None,
) -> Played:
    """Bring a run into the simulator's form.

    Args:
        sent: the requests of the run.
        events: its events; ``ended`` ones end flows.
        page_size: of the server, in tokens.
        told: whether the server was told stop reasons.
        journal: what the server's policies wrote down: its own times and steps then count, else the client's times,
            where a request starts when it is sent.

    Raises:
        ValueError: the journal misses a request of the run.
    """
    pages = _Pages(page_size)
    flows: dict[str, dict[str, list[Sent]]] = {}
    for one in sorted(sent, key=lambda s: s.record.turn):
        of_session = flows.setdefault(one.record.session, {MAIN_FLOW: []})
        of_session.setdefault(one.record.flow, []).append(one)
    builder = WorkloadBuilder(page_size, global_ids=True)
    by_request: list[Sent] = []
    flow_numbers: dict[tuple[str, str], int] = {}
    for session, named in flows.items():
        specs = []
        for name, turns in named.items():
            if turns:
                flow_numbers[session, name] = len(flow_numbers)
                specs.append(FlowSpec([_turn(one, pages, page_size, told) for one in turns]))
                by_request += turns
        builder.add(session, specs)
    held = np.array([_held_pages(one, page_size) for one in by_request], dtype=np.int64)
    if journal is None:
        return Played(builder.build(), by_request, _events(by_request, events, flow_numbers), held)
    steps = _own_steps(by_request, journal, flow_numbers)
    return Played(builder.build(), by_request, _as_events(steps), held, steps[steps["kind"] != START])


def _turn(one: Sent, pages: _Pages, page_size: int, told: bool) -> TurnSpec:
    # The last generated token's KV is never computed.
    ids = pages.of(np.concatenate((one.prompt, one.output[:-1])))
    full = len(one.prompt) // page_size
    stop = STOPS[one.record.recorded_stop] if told else Stop.UNKNOWN
    return TurnSpec(len(one.prompt), len(one.output), ids[:full], ids[full:], stop=stop)


def _held_pages(one: Sent, page_size: int) -> int:
    """Pages that a running request takes from the others, found in SGLang 0.5.23 (``mem_cache/allocation.py``).

    Prefill and every decode step first free a page more than they can need. The last step stores the KV of the last
    token but one, and before it the KV of all earlier ones is held.
    """
    tokens = len(one.prompt) + max(len(one.output) - 2, 0)
    return -(-tokens // page_size) + 1


def _events(sent: Sequence[Sent], events: Iterable[RunEvent], flows: dict[tuple[str, str], int]) -> Records:
    rows = []
    for number, one in enumerate(sent):
        rows += [(one.record.sent_s, ARRIVE, number), (one.record.sent_s, START, number)]
        rows.append((one.record.done_s, FINISH, number))
    for event in events:
        if event.kind == "ended":
            over = [n for (s, f), n in flows.items() if s == event.session and event.flow in (None, f)]
            rows += [(event.at_s, END, flow) for flow in over]
    return np.array(rows, dtype=EVENT)


_KINDS: dict[str, int] = {
    "arrive": ARRIVE,
    "match": MATCH,
    "start": START,
    "prefill": PREFILL,
    "keep": KEEP,
    "decode": DECODE,
    "release": RELEASE,
    "finish": FINISH,
}


def _own_steps(sent: Sequence[Sent], journal: Iterable[JournalEvent], flows: dict[tuple[str, str], int]) -> Records:
    """The server's steps: the n-th arrival of a conversation is its n-th request, and what follows belongs to it."""
    number_of = {conversation_name(*key): number for key, number in flows.items()}
    requests: dict[str, list[int]] = {}
    for number, one in enumerate(sent):
        requests.setdefault(conversation_name(one.record.session, one.record.flow), []).append(number)
    seen: Counter[tuple[str, str]] = Counter()
    rows = []
    for event in journal:
        name = event.conversation
        flow = number_of.get(name)
        if flow is None or event.kind == "evict":
            continue  # a health check, or a conversation of an earlier run
        if event.kind == "end":
            rows.append((event.at_s, END, flow, 0))
            continue
        seen[event.kind, name] += 1
        place = seen["arrive", name] - 1
        if 0 <= place < len(requests[name]):
            rows.append((event.at_s, _KINDS[event.kind], requests[name][place], event.tokens))
    for name, numbers in requests.items():
        for kind in ("arrive", "start", "finish"):
            if seen[kind, name] != len(numbers):
                raise ValueError(
                    f"the journal has {seen[kind, name]} events {kind!r} of {name}, the run {len(numbers)} requests; "
                    "a journal must be of one run, from its start to its end"
                )
    return np.array(rows, dtype=STEP)


def _as_events(steps: Records) -> Records:
    """When each request arrived, started and ended, and when conversations were over."""
    chosen = steps[np.isin(steps["kind"], (ARRIVE, START, FINISH, END))]
    events = np.zeros(len(chosen), dtype=EVENT)
    for field in ("time", "kind", "which"):
        events[field] = chosen[field]
    return events
