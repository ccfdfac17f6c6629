"""One pass over what happened, in order: where was each page when a request looked for it, and if not there, why?

The caller says what happened (``arrive``, ``look_up``, ``store``, ``evict``, ``computed``, ``end``) in the order in
which the cache saw it; a simulator knows that order, a live run rebuilds it from cache events. Afterwards ``losses``
gives the causes of one request.

An eviction is charged to the request that needed the memory. Had nothing been evicted before, that request would
have needed ``r`` pages less, those that it has to compute again; so the last ``r`` pages evicted for it are charged to
*recomputing*, the others to what the request is: a new session's first, a subagent's, or a conversation that grew. An
eviction stands on one side of that line as a whole, by its middle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from radix_cache.attribution.causes import Cause, EvictedBy, Loss, VictimState
from radix_cache.attribution.pages import DEVICE, NONE, PageState, Ranges, Run
from radix_cache.attribution.tier import TierAnswer
from radix_cache.features import Stop

_NEVER = 1 << 62


class Asked(NamedTuple):
    """A request."""

    flow: int  # any number: requests of one conversation have the same
    prompt: Ranges  # path of the prompt's pages
    answer: Ranges  # pages that the answer adds to it
    stop: Stop  # why its answer ended
    opens: bool  # the first request of a session's main flow
    subagent: bool


class Miss(NamedTuple):
    """What ``look_up`` found for one request: pages that could have hit and did not."""

    page_size: int
    hit: int  # tokens
    runs: tuple[tuple[Run, Cause | None], ...]  # None: decided by the removal


class _Removal(NamedTuple):
    tick: int
    culprit: int
    pages: int
    before: int  # pages evicted for the same request before
    tier: int
    cleared: bool


class Sweep:
    """See the module. ``requests`` in any order; they are meant by their index.

    Set ``sees_all`` to False once something that happened is not known: what was never seen in the cache may have been
    there all the same, and is then no longer said to be not admitted.
    """

    def __init__(self, requests: Sequence[Asked], pages: int = 0) -> None:
        self.sees_all = True
        self.state = PageState(pages)
        self._requests = requests
        self._tick = 0
        count = len(requests)
        self._arrived = [_NEVER] * count
        self._used = [_NEVER] * count
        self._computed = [False] * count
        self._ended = [_NEVER] * count
        self._removals: list[_Removal] = []
        self._evicted_for: dict[int, int] = {}
        self._misses: dict[int, Miss] = {}
        self._held: set[int] = set()
        self._flows: dict[int, list[int]] = {}  # flow -> its requests in order of arrival
        self._turns: dict[int, int] = {}
        for asked in requests:
            self._turns[asked.flow] = self._turns.get(asked.flow, 0) + 1

    # -- what happened, in order --------------------------------------------------------------------------------------

    def arrive(self, request: int) -> None:
        """The request was sent: from now on a page that only it will compute is in flight."""
        asked = self._requests[request]
        self._arrived[request] = self._now()
        self._flows.setdefault(asked.flow, []).append(request)
        self.state.claim(asked.prompt, request)
        self.state.claim(asked.answer, request)

    def hold(self, request: int) -> None:
        """Admission kept the request waiting after it had been sent."""
        self._held.add(request)

    def look_up(self, request: int, hit: int, best: int, page_size: int, answer: TierAnswer | None = None) -> None:
        """The request was matched and got ``hit`` tokens of the ``best`` that were possible. Asked again, the later
        answer counts.

        Args:
            answer: what the request heard from the tier below the device, where that is known.
        """
        runs = []
        found = self.state.runs(self._requests[request].prompt, hit // page_size, best // page_size)
        for run in found if answer is None else _cut(found, [tokens // page_size for tokens in answer.borders()]):
            cause: Cause | None = None
            if run.tiers & DEVICE:
                cause = Cause.UNEXPLAINED
            elif run.tiers:
                cause = Cause.NOT_RESTORED if answer is None else answer.cause_at(run.at * page_size)
            elif not run.stored:
                flying = run.maker not in (NONE, request) and not self._computed[run.maker]
                cause = Cause.IN_FLIGHT if flying else Cause.NOT_ADMITTED
                if run.maker in (NONE, request) or not (flying or self.sees_all):
                    cause = Cause.UNEXPLAINED  # theory says that somebody had it
            runs.append((run, cause))
        self._misses[request] = Miss(page_size, hit, tuple(runs))

    def use(self, request: int) -> None:
        """From now on the request is the last user of its pages."""
        self._used[request] = self._now()
        self.state.use(self._requests[request].prompt, request)

    def computed(self, request: int) -> None:
        """All of the prompt has been computed: what the cache lacks of it now, it did not take."""
        self._computed[request] = True

    def end(self, request: int) -> None:
        self._computed[request] = True
        self._ended[request] = self._now()
        self.state.use(self._requests[request].answer, request)

    def store(self, ranges: Ranges, tier: int = DEVICE) -> None:
        self.state.store(ranges, tier)

    def evict(self, ranges: Ranges, culprit: int = NONE, tier: int = DEVICE) -> int:
        """Pages leave a tier because ``culprit`` needs room. Returns the eviction's index."""
        pages = int(ranges[:, 1].sum())
        before = self._evicted_for.get(culprit, 0)
        self._evicted_for[culprit] = before + pages
        self._removals.append(_Removal(self._now(), culprit, pages, before, tier, False))
        self.state.remove(ranges, len(self._removals) - 1, tier)
        return len(self._removals) - 1

    def charge(self, eviction: int, culprit: int) -> None:
        """Say afterwards who needed the room of an eviction that had no culprit."""
        removal = self._removals[eviction]
        before = self._evicted_for.get(culprit, 0)
        self._evicted_for[culprit] = before + removal.pages
        self._removals[eviction] = removal._replace(culprit=culprit, before=before)

    def clear(self) -> None:
        """The whole cache was emptied."""
        self._removals.append(_Removal(self._now(), NONE, 0, 0, DEVICE, True))
        self.state.clear(len(self._removals) - 1)

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def losses(self, request: int) -> list[Loss]:
        """Causes of one request's lost tokens, by position; empty where it was not looked up.

        What is ``UNEXPLAINED`` is left out: the chain finds it as what is left over.
        """
        miss = self._misses.get(request)
        if miss is None:
            return []
        found = []
        for run, cause in miss.runs:
            start = max(run.at * miss.page_size, miss.hit)  # a hit can end within a page
            tokens = (run.at + run.pages) * miss.page_size - start
            if cause is Cause.UNEXPLAINED:
                continue
            if cause is not None:
                found.append(Loss(cause, tokens, start))
                continue
            removal = self._removals[run.removal]
            culprit = None if removal.culprit == NONE else removal.culprit
            cause = Cause.EVICTED if removal.tier == DEVICE else Cause.OFFLOAD_LOST
            if cause is Cause.EVICTED and request in self._held and removal.tick > self._arrived[request]:
                cause = Cause.HELD
            found.append(
                Loss(
                    cause,
                    tokens,
                    start,
                    self._reason(removal),
                    self._victim(run.user, removal.tick),
                    culprit,
                )
            )
        return found

    def _reason(self, removal: _Removal) -> EvictedBy:
        if removal.cleared:
            return EvictedBy.CLEARED
        if removal.culprit == NONE:
            return EvictedBy.UNKNOWN
        avoidable = self._recomputed(removal.culprit)
        if removal.before + removal.pages / 2 >= self._evicted_for[removal.culprit] - avoidable:
            return EvictedBy.RECOMPUTE
        asked = self._requests[removal.culprit]
        if asked.subagent:
            return EvictedBy.SUBAGENT
        return EvictedBy.NEW_SESSION if asked.opens else EvictedBy.GROWTH

    def _recomputed(self, request: int) -> int:
        """Pages that a request computes again because they had been evicted."""
        miss = self._misses.get(request)
        return 0 if miss is None else sum(run.pages for run, cause in miss.runs if cause is None)

    def _victim(self, user: int, tick: int) -> VictimState:
        if user == NONE:
            return VictimState.UNKNOWN
        flow = self._flows[self._requests[user].flow]
        newest_at = bisect_right(flow, tick, key=self._arrived.__getitem__) - 1
        newest = flow[newest_at]
        if newest != user and self._used[newest] <= tick:
            return VictimState.SUPERSEDED  # the flow has gone on without these pages
        if self._ended[newest] > tick:
            return VictimState.RUNNING
        if newest_at + 1 == self._turns[self._requests[user].flow]:
            return VictimState.ENDED
        return {Stop.TOOL: VictimState.TOOL_WAIT, Stop.TURN: VictimState.USER_WAIT}.get(
            self._requests[newest].stop, VictimState.WAIT
        )

    def _now(self) -> int:
        self._tick += 1
        return self._tick


def _cut(runs: Sequence[Run], borders: Sequence[int]) -> list[Run]:
    """The same pages as runs that end at each border, a position in the path."""
    cut = []
    for run in runs:
        inside = [at for at in borders if run.at < at < run.at + run.pages]
        edges = [run.at, *sorted(set(inside)), run.at + run.pages]
        cut += [run._replace(at=start, pages=end - start) for start, end in pairwise(edges)]
    return cut
