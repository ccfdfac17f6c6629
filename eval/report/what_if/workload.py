"""The simulator's workload of a run that was recorded. Pure.

With cache events every page of every prompt has its number, so the workload is exact. Without them a record still tells
how long its prefix is that some earlier request shares, though not which one; the prompts are then rebuilt from these
lengths, sharing with the nearest request that can have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from radix_cache.attribution.pages import Numbers, Ranges, as_ranges, head, length
from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, TurnSpec, Workload, WorkloadBuilder
from traces.model import MAIN_FLOW, StopReason
from traces.replay.events import KvEvents
from traces.replay.record import RequestRecord

Key = tuple[str, str, int]  # session, flow, turn

_STOPS = {StopReason.TOOL_USE.value: Stop.TOOL, StopReason.END_TURN.value: Stop.TURN}
_CLOCK_S = 1e-6  # what two readings of one clock may differ by


class Path(NamedTuple):
    """Page numbers of a request: its prompt's full pages, and those that its answer adds."""

    prompt: Ranges
    answer: Ranges


class RunWorkload(NamedTuple):
    workload: Workload
    source: Literal["cache events", "prefix lengths"]
    left_out: int  # completed requests that could not be taken


def workload_of_run(records: Sequence[RequestRecord], page_size: int, events: KvEvents | None) -> RunWorkload | None:
    """The completed requests of a run, in its own order and with its own times.

    A turn waits as long after the one before it as it did in the run, and takes as long; subagents start and are waited
    for where they were.

    Args:
        records: of the run, in any order.
        page_size: tokens per page of the simulated cache.
        events: of the run; used only where they are about pages of that size.

    Returns:
        None where no request was completed.
    """
    completed = [record for record in records if record.error is None]
    usable = events is not None and bool(events.paths) and events.header.page_size == page_size
    pairs = int(usable and events is not None and events.header.pair_keys)
    if usable and events is not None:
        paths, pages = _recorded_paths(events)
    else:
        paths, pages = rebuilt_paths(completed, page_size)
    taken = [r for r in completed if _fits(r, paths.get(_key(r)), page_size, pairs)]
    if not taken:
        return None
    builder = WorkloadBuilder(page_size, numbered=pages)
    for session, own in _sessions(taken):
        builder.add(session, _flows(own, paths, pairs))
    source: Literal["cache events", "prefix lengths"] = "cache events" if usable else "prefix lengths"
    return RunWorkload(builder.build(), source, len(completed) - len(taken))


def rebuilt_paths(records: Sequence[RequestRecord], page_size: int) -> tuple[dict[Key, Path], int]:
    """Paths whose shared prefixes are as long as the records say, and how many page numbers they use.

    The prefix is taken from the flow's own previous request where that is long enough, else from the latest request of
    the session, else of any session, that is.
    """
    book = _Book(page_size)
    paths: dict[Key, Path] = {}
    for record in sorted(records, key=lambda r: (r.sent_s, r.turn)):
        paths[_key(record)] = book.path(record)
    return paths, book.pages


class _Book:
    def __init__(self, page_size: int) -> None:
        self.pages = 0
        self._page = page_size
        self._flow: dict[tuple[str, str], Ranges] = {}  # latest request of a flow
        self._session: dict[str, list[Ranges]] = {}
        self._first: list[Ranges] = []  # first request of each session

    def path(self, record: RequestRecord) -> Path:
        prompt = record.prompt_tokens // self._page
        cached = (record.prompt_tokens + max(record.output_tokens - 1, 0)) // self._page
        shared = min(record.shared_output_lcp // self._page, prompt)
        own = self._session.setdefault(record.session, [])
        base = self._base(record, shared, own)
        shared = min(shared, length(base))
        fresh = as_ranges([(self.pages, cached - shared)]) if cached > shared else as_ranges([])
        self.pages += cached - shared
        whole = np.concatenate((head(base, shared), fresh))
        if not own:
            self._first.append(whole)
        own.append(whole)
        self._flow[record.session, record.flow] = whole
        return Path(head(whole, prompt), _tail(whole, prompt))

    def _base(self, record: RequestRecord, shared: int, own: list[Ranges]) -> Ranges:
        latest = self._flow.get((record.session, record.flow))
        if latest is not None and length(latest) >= shared:
            return latest
        within = record.session_output_lcp >= record.shared_output_lcp
        for path in reversed(own if within else self._first):
            if length(path) >= shared:
                return path
        return max([*own, *self._first[-1:]], key=length, default=as_ranges([]))


def _recorded_paths(events: KvEvents) -> tuple[dict[Key, Path], int]:
    paths, pages = {}, 0
    for key, one in events.paths.items():
        paths[key] = Path(as_ranges(one.prompt), as_ranges(one.answer))
        pages = max(pages, max((first + count for first, count in (*one.prompt, *one.answer)), default=0))
    return paths, pages


def _key(record: RequestRecord) -> Key:
    return (record.session, record.flow, record.turn)


def _fits(record: RequestRecord, path: Path | None, page_size: int, pairs: int) -> bool:
    """With pairs of tokens as keys, a prompt has a key less than tokens."""
    tokens = record.prompt_tokens - pairs
    return path is not None and tokens >= 1 and length(path.prompt) == tokens // page_size


def _sessions(records: Sequence[RequestRecord]) -> list[tuple[str, list[RequestRecord]]]:
    """Sessions in the order in which they began."""
    sessions: dict[str, list[RequestRecord]] = {}
    for record in sorted(records, key=lambda r: (r.sent_s, r.turn)):
        sessions.setdefault(record.session, []).append(record)
    return list(sessions.items())


def _flows(records: Sequence[RequestRecord], paths: Mapping[Key, Path], pairs: int) -> list[FlowSpec]:
    """A session's flows, the main one first; where its main flow has no request, the one that began first."""
    flows: dict[str, list[RequestRecord]] = {}
    for record in records:
        flows.setdefault(record.flow, []).append(record)
    for turns in flows.values():
        turns.sort(key=lambda r: r.turn)
    first = MAIN_FLOW if MAIN_FLOW in flows else next(iter(flows))
    main = flows.pop(first)
    specs = [FlowSpec([_turn(r, paths[_key(r)], pairs) for r in main])]
    for turns in flows.values():
        after, before = _place(main, turns)
        specs.append(FlowSpec([_turn(r, paths[_key(r)], pairs) for r in turns], spawn_after=after, join_before=before))
    return specs


def _place(main: Sequence[RequestRecord], turns: Sequence[RequestRecord]) -> tuple[int | None, int | None]:
    """After which main turn a subagent was started, and before which one it was waited for."""
    began, ended = turns[0].ready_s - turns[0].think_s, turns[-1].done_s
    after = max((i for i, r in enumerate(main) if r.done_s <= began + _CLOCK_S), default=None)
    later = range(0 if after is None else after + 1, len(main))
    return after, next((i for i in later if main[i].ready_s >= ended - _CLOCK_S), None)


def _turn(record: RequestRecord, path: Path, pairs: int) -> TurnSpec:
    # In the server's queue a request holds no memory: that is part of the wait before it. Where the server does not
    # say, the duration holds that wait.
    queued = min(record.queued_s or 0.0, record.done_s - record.sent_s)
    return TurnSpec(
        prompt_tokens=record.prompt_tokens - pairs,
        output_tokens=record.output_tokens,
        pages=_numbers(path.prompt),
        answer=_numbers(path.answer),
        think_s=max(0.0, record.think_s + record.sent_s - record.ready_s + queued),
        service_s=max(0.0, record.done_s - record.sent_s - queued),
        stop=_STOPS.get(record.recorded_stop, Stop.UNKNOWN),
    )


def _numbers(ranges: Ranges) -> Numbers:
    """All page numbers of a path."""
    counts = ranges[:, 1]
    before = np.cumsum(counts) - counts
    found: Numbers = np.repeat(ranges[:, 0] - before, counts) + np.arange(length(ranges))
    return found


def _tail(ranges: Ranges, pages: int) -> Ranges:
    """A path without its first pages."""
    kept = head(ranges, pages)
    rest = ranges[len(kept) :].copy()
    cut = length(kept) - length(ranges[: max(len(kept) - 1, 0)]) if len(kept) else 0
    if len(kept) and cut < ranges[len(kept) - 1, 1]:
        first, count = ranges[len(kept) - 1].tolist()
        rest = np.concatenate((as_ranges([(first + cut, count - cut)]), rest))
    return rest
