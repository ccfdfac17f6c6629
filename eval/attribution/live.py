"""Attribution of a replayed run: records and cache events in, causes per request out. Pure.

When did the server match a request? It does not say; but the request hit ``R`` tokens on the device, so at that moment
the device held exactly the first ``R / page`` pages of its prompt. That moment lies between sending and first token,
and the events tell each state of the cache in between, in order. The last state that fits is taken. Where none fits,
the evidence contradicts the server's count, and what is left over is shown as unexplained.

A match can also fall *within* one event: SGLang joins neighbouring events of one kind before it publishes them. A store
that passes ``R`` on its way, or a removal that does, fits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radix_cache.attribution import (
    Asked,
    Attribution,
    CacheKind,
    Cause,
    Lengths,
    Loss,
    Sweep,
    TierAnswer,
    attribute,
    reachable,
    without_events,
)
from radix_cache.attribution.pages import DEVICE, NONE, Ranges, as_ranges, length, numbers
from radix_cache.features import Stop
from traces.model import MAIN_FLOW
from traces.replay.events import KvEvents
from traces.replay.record import RequestRecord

_STOPS = {"tool_use": Stop.TOOL, "end_turn": Stop.TURN}
_NOWHERE = -1


def lengths_of(record: RequestRecord) -> Lengths:
    """A record's levels; the request must have a cached-token count."""
    if record.cached_tokens is None:
        raise ValueError("the server reported no cached tokens for this request")
    return Lengths(record.prompt_tokens, record.shared_output_lcp, record.session_output_lcp, record.cached_tokens)


def attribute_without_events(records: Sequence[RequestRecord], cache: CacheKind) -> list[Attribution]:
    """The part that is sound without cache events; see ``radix_cache.attribution.without_events``."""
    return [without_events(lengths_of(record), cache, record.ready_lcp) for record in records]


def attribute_with_events(
    records: Sequence[RequestRecord], compared: Sequence[RequestRecord], events: KvEvents, cache: CacheKind
) -> list[Attribution]:
    """Causes for each of ``compared``; ``Loss.culprit`` is an index into ``records``.

    Args:
        records: all of the run; failed ones filled and emptied the cache as well.
        compared: those with a cached-token count, part of ``records``.
        events: of the same run.
        cache: what kind of cache it was; its page size and keys must be the events'.
    """
    known = [i for i, r in enumerate(records) if (r.session, r.flow, r.turn) in events.paths]
    matcher = _Matcher([records[i] for i in known], events, cache)
    matcher.run()
    index = {(records[i].session, records[i].flow, records[i].turn): number for number, i in enumerate(known)}
    found = []
    for record in compared:
        number = index.get((record.session, record.flow, record.turn))
        losses = [] if number is None else [*matcher.sweep.losses(number), *matcher.gains.get(number, ())]
        losses = [loss if loss.culprit is None else loss._replace(culprit=known[loss.culprit]) for loss in losses]
        found.append(attribute(lengths_of(record), cache, losses))
    return found


def _asked(record: RequestRecord, events: KvEvents, flows: dict[tuple[str, str], int]) -> Asked:
    path = events.paths[record.session, record.flow, record.turn]
    main = record.flow == MAIN_FLOW
    return Asked(
        flow=flows.setdefault((record.session, record.flow), len(flows)),
        prompt=as_ranges(path.prompt),
        answer=as_ranges(path.answer),
        stop=_STOPS.get(record.recorded_stop, Stop.UNKNOWN),
        opens=main and record.turn == 0,
        subagent=not main,
    )


@dataclass(slots=True)
class _Open:
    """A request that may be matched now."""

    request: int
    hit: int  # tokens
    best: int  # tokens that could have hit; the request lost something where it is above ``hit``
    last: int  # page number before the first lost one; _NOWHERE: the first page was lost
    first: int  # page number of the first one that the device did not have; _NOWHERE: nothing was lost
    exact: bool = False  # a state of the cache fitted
    final: bool = False  # it has stored what it lacked: it was matched before


class _Matcher:
    def __init__(self, records: Sequence[RequestRecord], events: KvEvents, cache: CacheKind) -> None:
        flows: dict[tuple[str, str], int] = {}
        self._records = records
        self._asked = [_asked(record, events, flows) for record in records]
        self.sweep = Sweep(self._asked)
        self._batches = events.batches
        self._gaps = bool(events.gaps)
        self.sweep.sees_all = events.header.emptied
        self._cache = cache
        self._open: dict[int, _Open] = {}
        self._running: set[int] = set()
        self._uncharged: list[int] = []
        self._left: list[int] = []  # ended, but this batch may still tell of their last store
        self._arrived: list[int] = []  # requests in order of sending
        self.gains: dict[int, list[Loss]] = {}

    def run(self) -> None:
        order = sorted(range(len(self._records)), key=lambda i: self._records[i].sent_s)
        coming = iter([*order, None])
        following = next(coming)
        expected: int | None = None
        for batch in self._batches:
            if expected is not None and batch.seq != expected:
                self.sweep.sees_all = False
            expected = batch.seq + 1
            while following is not None and self._records[following].sent_s <= batch.at:
                self._arrive(following)
                following = next(coming)
            for op in batch.ops:
                if op[0] == "store":
                    self._store(as_ranges(op[2]), op[1])
                elif op[0] == "remove":
                    self._remove(as_ranges(op[2]), op[1])
                else:
                    self._remove(None, 0)
            self._pass(batch.at)
        self.sweep.sees_all = self.sweep.sees_all and not self._gaps  # events may have ended before the run did
        while following is not None:
            self._arrive(following)
            following = next(coming)
        self._pass(float("inf"))

    def _arrive(self, request: int) -> None:
        record, asked = self._records[request], self._asked[request]
        for other in self._running:
            if self._first_token(other) <= record.sent_s:
                self.sweep.computed(other)  # no batch of events need tell of it
        for other in [r for r in self._running if self._records[r].done_s <= record.sent_s]:
            one = self._open.get(other)
            if one is None or one.final or one.first == _NOWHERE:
                self._leave(other)  # what is evicted for a request that was sent later finds it ended
        self.sweep.arrive(request)
        if record.held_s is not None:
            self.sweep.hold(request)
        self._arrived.append(request)
        self._running.add(request)
        hit = best = record.cached_tokens or 0
        if record.cached_tokens is not None:
            best = min(reachable(lengths_of(record), self._cache), length(asked.prompt) * self._cache.page_size)
        first = last = _NOWHERE
        if hit < best:
            # What was restored from a tier below was not on the device when the request was matched.
            at = (hit - (record.cached_host or 0) - (record.cached_storage or 0)) // self._cache.page_size
            around = numbers(asked.prompt, max(at - 1, 0), at + 1).tolist()
            first, last = around[-1], around[0] if at else _NOWHERE
        self._open[request] = _Open(request, hit, best, last, first)

    def _store(self, ranges: Ranges, tier: int) -> None:
        state = self.sweep.state
        if tier == DEVICE:
            for one in self._open.values():
                if one.first == _NOWHERE or state.has(one.first, DEVICE) or not _within(one.first, ranges):
                    continue
                if self._has_last(one) or _within(one.last, ranges):
                    self._capture(one, exact=True)
                    one.final = self._is_own(one)
            self._charge(int(ranges[-1].sum()) - 1 if len(ranges) else _NOWHERE)
        self.sweep.store(ranges, tier)

    def _remove(self, ranges: Ranges | None, tier: int) -> None:
        """Pages leave a tier; None: all leave all tiers."""
        state = self.sweep.state
        lost = [one for one in self._open.values() if one.first != _NOWHERE]
        before = [(state.has(one.first, DEVICE), self._has_last(one)) for one in lost]
        if ranges is None:
            self.sweep.clear()
        elif len(ranges):
            self._uncharged.append(self.sweep.evict(ranges, tier=tier))
        for one, (had_first, had_last) in zip(lost, before, strict=True):
            if self._has_last(one):
                continue  # it fits, and is taken when it no longer does, or when the window closes
            if had_last and not (had_first and state.has(one.first, DEVICE)):
                self._capture(one, exact=True)

    def _pass(self, now: float) -> None:
        """A batch is done: close what has its first token, end what has ended."""
        self._left.clear()
        for request in [r for r in self._running if self._first_token(r) < now]:
            one = self._open.pop(request, None)
            if one is not None:
                self._note_gain(one)
                if one.first != _NOWHERE:
                    fits = self._has_last(one)
                    if fits and not self.sweep.state.has(one.first, DEVICE):
                        self._capture(one, exact=True)
                    elif not one.exact:
                        self._capture(one, exact=False)
                self.sweep.use(request)
                self.sweep.computed(request)
            if self._records[request].done_s < now:
                self._running.discard(request)
                self.sweep.end(request)

    def _leave(self, request: int) -> None:
        one = self._open.pop(request, None)
        if one is not None:
            self._note_gain(one)
            self.sweep.use(request)
        self._running.discard(request)
        self._left.append(request)
        self.sweep.end(request)

    def _note_gain(self, one: _Open) -> None:
        """A hit beyond theory is explained where a request that was sent later has the same pages."""
        if one.hit <= one.best:
            return
        (page,) = numbers(self._asked[one.request].prompt, *self._last_page(one.hit)).tolist() or (_NOWHERE,)
        for later in reversed(self._arrived):
            if later == one.request:
                return
            if _within(page, self._asked[later].prompt) or _within(page, self._asked[later].answer):
                self.gains[one.request] = [Loss(Cause.OVERTAKEN, one.best - one.hit, one.best)]
                return

    def _last_page(self, tokens: int) -> tuple[int, int]:
        """Positions of the last page of a prefix of so many tokens."""
        end = -(-tokens // self._cache.page_size)
        return end - 1, end

    def _first_token(self, request: int) -> float:
        record = self._records[request]
        return record.done_s if record.first_token_s is None else record.first_token_s

    def _has_last(self, one: _Open) -> bool:
        return one.last == _NOWHERE or self.sweep.state.has(one.last, DEVICE)

    def _is_own(self, one: _Open) -> bool:
        """Whether nobody but the request itself can store the first page that it lacked."""
        others = (self._asked[request] for request in (*self._running, *self._left) if request != one.request)
        return not any(_within(one.first, asked.prompt) or _within(one.first, asked.answer) for asked in others)

    def _capture(self, one: _Open, *, exact: bool) -> None:
        if not one.final and (exact or not one.exact):
            answer = self._records[one.request].offload
            heard = None if answer is None else TierAnswer(**answer.model_dump(include=set(TierAnswer._fields)))
            self.sweep.look_up(one.request, one.hit, one.best, self._cache.page_size, heard)
            one.exact = one.exact or exact

    def _charge(self, page: int) -> None:
        """Evictions since the last store made room for the request that stores ``page`` now."""
        if not self._uncharged:
            return
        culprit = self._writer(page)
        if culprit != NONE:
            for eviction in self._uncharged:
                self.sweep.charge(eviction, culprit)
            self._uncharged.clear()

    def _writer(self, page: int) -> int:
        for request in self._open:
            if _within(page, self._asked[request].prompt):
                return request
        for request in (*sorted(self._running), *self._left):
            if _within(page, self._asked[request].answer) or _within(page, self._asked[request].prompt):
                return request
        return NONE


def _within(page: int, ranges: Ranges) -> bool:
    return any(first <= page < first + count for first, count in ranges.tolist())
