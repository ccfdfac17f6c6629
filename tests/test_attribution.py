"""Causes of lost hits: by hand on a small cache, and as laws over any lengths and any order of events."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_cache.attribution import (
    Asked,
    CacheKind,
    Cause,
    EvictedBy,
    Lengths,
    Loss,
    Sweep,
    VictimState,
    attribute,
    reachable,
    without_events,
)
from radix_cache.attribution.pages import HOST, PageState, as_ranges, head, length, numbers
from radix_cache.features import Stop

PAGE = 4
NOTHING = as_ranges([])


def asked(flow: int, *prompt: tuple[int, int], stop: Stop = Stop.TOOL, opens: bool = False, sub: bool = False) -> Asked:
    return Asked(flow, as_ranges(prompt), NOTHING, stop, opens, sub)


def serve(sweep: Sweep, request: int, hit: int = 0, best: int = 0) -> None:
    """Arrive, look up, and leave the whole prompt in the cache."""
    sweep.arrive(request)
    sweep.look_up(request, hit * PAGE, best * PAGE, PAGE)
    sweep.use(request)
    sweep.store(sweep._requests[request].prompt)
    sweep.computed(request)
    sweep.end(request)


def test_paths_of_pages() -> None:
    path = as_ranges([(10, 3), (40, 2)])
    assert length(path) == 5
    assert numbers(path, 1, 4).tolist() == [11, 12, 40]
    assert [head(path, n).tolist() for n in (0, 2, 3, 4, 9)] == [
        [], [[10, 2]], [[10, 3]], [[10, 3], [40, 1]], [[10, 3], [40, 2]],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="count >= 1"):
        as_ranges([(1, 0)])


def test_an_eviction_names_victim_and_reason() -> None:
    """Flow 0 waits for a tool; a new session takes its last page, then a subagent the rest."""
    requests = [
        asked(0, (0, 3), opens=True),
        asked(1, (10, 4), opens=True),
        asked(2, (20, 2), sub=True),
        asked(0, (0, 4)),
    ]
    sweep = Sweep(requests)
    serve(sweep, 0)
    sweep.arrive(1)
    sweep.evict(as_ranges([(2, 1)]), culprit=1)
    serve(sweep, 1)
    sweep.evict(as_ranges([(1, 1)]), culprit=2)
    serve(sweep, 2)
    serve(sweep, 3, hit=1, best=3)
    assert sweep.losses(3) == [
        Loss(Cause.EVICTED, PAGE, 4, EvictedBy.SUBAGENT, VictimState.TOOL_WAIT, 2),
        Loss(Cause.EVICTED, PAGE, 8, EvictedBy.NEW_SESSION, VictimState.TOOL_WAIT, 1),
    ]


def test_a_hit_that_ends_within_a_page_loses_the_rest_of_it() -> None:
    sweep = Sweep([asked(0, (0, 3), opens=True), asked(0, (0, 3))])
    serve(sweep, 0)
    sweep.evict(as_ranges([(1, 2)]))
    sweep.arrive(1)
    sweep.look_up(1, 5, 12, PAGE)
    (loss,) = sweep.losses(1)
    assert (loss.at, loss.tokens, loss.by) == (5, 7, EvictedBy.UNKNOWN)


def test_recomputing_is_charged_with_what_it_alone_evicted() -> None:
    """Request 2 needs 2 new pages and 2 that had been evicted: of 4 pages evicted for it, the last 2 are thrash."""
    requests = [asked(0, (0, 2), opens=True), asked(1, (10, 4), opens=True), asked(0, (0, 4)), asked(1, (10, 5))]
    sweep = Sweep(requests)
    serve(sweep, 0)
    sweep.evict(as_ranges([(0, 2)]), culprit=1)
    serve(sweep, 1)
    sweep.arrive(2)
    sweep.look_up(2, 0, 2 * PAGE, PAGE)
    sweep.evict(as_ranges([(12, 2)]), culprit=2)
    sweep.evict(as_ranges([(10, 2)]), culprit=2)
    sweep.use(2)
    sweep.store(requests[2].prompt)
    sweep.end(2)
    serve(sweep, 3, hit=0, best=4)
    assert [(loss.tokens // PAGE, loss.by) for loss in sweep.losses(3)] == [
        (2, EvictedBy.RECOMPUTE),
        (2, EvictedBy.GROWTH),
    ]


@pytest.mark.parametrize(
    ("stop", "more", "state"),
    [
        (Stop.TOOL, True, VictimState.TOOL_WAIT),
        (Stop.TURN, True, VictimState.USER_WAIT),
        (Stop.UNKNOWN, True, VictimState.WAIT),
        (Stop.TURN, False, VictimState.ENDED),
    ],
)
def test_state_of_the_victim(stop: Stop, more: bool, state: VictimState) -> None:
    requests = [asked(0, (0, 2), stop=stop, opens=True), asked(1, (0, 2), opens=True)]
    if more:
        requests.append(asked(0, (0, 3)))
    sweep = Sweep(requests)
    serve(sweep, 0)
    sweep.evict(as_ranges([(0, 2)]))
    serve(sweep, 1, best=2)
    assert [loss.victim for loss in sweep.losses(1)] == [state]


def test_victim_whose_next_request_waits_and_one_that_went_another_way() -> None:
    requests = [asked(0, (0, 2), opens=True), asked(0, (0, 1), (30, 1)), asked(0, (0, 3))]
    sweep = Sweep(requests)
    serve(sweep, 0)
    sweep.arrive(1)
    sweep.evict(as_ranges([(0, 1)]))  # the next turn is in the queue and needs it
    sweep.look_up(1, 0, PAGE, PAGE)
    assert [loss.victim for loss in sweep.losses(1)] == [VictimState.RUNNING]
    sweep.use(1)
    sweep.store(requests[1].prompt)
    sweep.end(1)
    sweep.evict(as_ranges([(1, 1)]))  # the branch that turn 1 left
    sweep.arrive(2)
    sweep.look_up(2, PAGE, 2 * PAGE, PAGE)
    assert [loss.victim for loss in sweep.losses(2)] == [VictimState.SUPERSEDED]


def test_in_flight_not_admitted_and_what_nobody_had() -> None:
    requests = [asked(0, (0, 2), opens=True), asked(1, (0, 2), opens=True), asked(2, (0, 2), (9, 1), opens=True)]
    sweep = Sweep(requests)
    sweep.arrive(0)
    sweep.arrive(1)
    sweep.look_up(1, 0, 2 * PAGE, PAGE)
    sweep.end(0)  # and nothing was stored
    sweep.arrive(2)
    sweep.look_up(2, 0, 3 * PAGE, PAGE)
    assert [(loss.cause, loss.tokens) for loss in sweep.losses(1)] == [(Cause.IN_FLIGHT, 2 * PAGE)]
    assert [(loss.cause, loss.tokens) for loss in sweep.losses(2)] == [(Cause.NOT_ADMITTED, 2 * PAGE)]
    made = attribute(Lengths(14, 12, 12, 0), CacheKind(PAGE), sweep.losses(2))
    assert made.losses[-1] == Loss(Cause.UNEXPLAINED, PAGE, 0)


def test_offload_tier_lost_or_not_restored() -> None:
    requests = [asked(0, (0, 3), opens=True), asked(0, (0, 3))]
    sweep = Sweep(requests)
    serve(sweep, 0)
    sweep.store(as_ranges([(1, 2)]), HOST)
    sweep.evict(as_ranges([(1, 2)]))
    sweep.evict(as_ranges([(2, 1)]), tier=HOST)
    sweep.arrive(1)
    sweep.look_up(1, PAGE, 3 * PAGE, PAGE)
    assert [(loss.cause, loss.at) for loss in sweep.losses(1)] == [(Cause.NOT_RESTORED, 4), (Cause.OFFLOAD_LOST, 8)]


def test_a_cleared_cache() -> None:
    sweep = Sweep([asked(0, (0, 2), opens=True), asked(0, (0, 2))])
    serve(sweep, 0)
    sweep.clear()
    serve(sweep, 1, best=2)
    assert [loss.by for loss in sweep.losses(1)] == [EvictedBy.CLEARED]


def test_chain_by_hand() -> None:
    """Prompt 100, shares 91 with others and 83 with its session; pages of 8; nothing hits."""
    lengths = Lengths(prompt=100, shared=91, session=83, realized=0)
    assert [
        (loss.cause, loss.tokens)
        for loss in attribute(lengths, CacheKind(8, "session"), [Loss(Cause.EVICTED, 80, 0)]).losses
    ] == [(Cause.NOT_SHARED, 8), (Cause.PAGE_ALIGNMENT, 3), (Cause.EVICTED, 80)]
    # 88 common tokens have 87 pairs: one page of 8 less.
    pairs = attribute(lengths._replace(shared=88, realized=80), CacheKind(8, pair_keys=True))
    assert pairs.losses == (Loss(Cause.SPECULATION_KEY, 8, 80),)
    assert attribute(lengths._replace(realized=96), CacheKind(8)).losses == (
        Loss(Cause.PAGE_ALIGNMENT, 3, 88),
        Loss(Cause.UNEXPLAINED, -8, 88),
    )


@st.composite
def any_lengths(draw: st.DrawFn) -> tuple[Lengths, CacheKind, int]:
    prompt = draw(st.integers(1, 300))
    shared = draw(st.integers(0, prompt))
    lengths = Lengths(prompt, shared, draw(st.integers(0, shared)), draw(st.integers(0, prompt)))
    cache = CacheKind(
        draw(st.sampled_from([1, 2, 16, 128])), draw(st.sampled_from(["shared", "session"])), draw(st.booleans())
    )
    return lengths, cache, draw(st.integers(0, shared))


@given(any_lengths())
@settings(max_examples=300)
def test_causes_always_sum_to_the_gap(drawn: tuple[Lengths, CacheKind, int]) -> None:
    lengths, cache, ready = drawn
    for made in (attribute(lengths, cache), without_events(lengths, cache, ready)):
        assert sum(loss.tokens for loss in made.losses) == made.gap == made.ideal - lengths.realized
        assert made.aligned == reachable(lengths, cache) <= made.ideal
        assert all(loss.tokens > 0 for loss in made.losses if loss.cause is not Cause.UNEXPLAINED)
        # only what passes all theory is unexplained when nothing was observed
    (left,) = [
        sum(loss.tokens for loss in made.losses if loss.cause is Cause.UNEXPLAINED)
        for made in (without_events(lengths, cache, ready),)
    ]
    assert left == min(0, reachable(lengths, cache) - lengths.realized)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11), st.integers(1, 4), st.sampled_from([1, 2])), max_size=30)
)
def test_page_state_agrees_with_sets(operations: list[tuple[int, int, int, int]]) -> None:
    state = PageState()
    held: dict[int, set[int]] = {1: set(), 2: set()}
    removed: dict[int, int] = {}
    for number, (kind, first, count, tier) in enumerate(operations):
        pages = set(range(first, first + count))
        if kind == 0:
            state.store(as_ranges([(first, count)]), tier)
            held[tier] |= pages
        elif kind == 1:
            state.remove(as_ranges([(first, count)]), number, tier)
            for page in pages & held[tier]:
                held[tier].discard(page)
                if not any(page in tiers for tiers in held.values()):
                    removed[page] = number
        else:
            state.clear(number)
            removed |= dict.fromkeys(held[1] | held[2], number)
            held = {1: set(), 2: set()}
    runs = state.runs(as_ranges([(0, 16)]), 0, 16)
    assert [run.at for run in runs] == np.cumsum([0, *(run.pages for run in runs)])[:-1].tolist()
    assert sum(run.pages for run in runs) == 16
    for run in runs:
        for page in range(run.at, run.at + run.pages):
            assert run.tiers == sum(tier for tier, pages in held.items() if page in pages)
            assert run.removal == removed.get(page, -1)


def test_what_may_have_been_missed_is_not_called_not_admitted() -> None:
    requests = [asked(0, (0, 2), opens=True), asked(1, (0, 2), opens=True)]
    sweep = Sweep(requests)
    sweep.arrive(0)
    sweep.end(0)
    sweep.arrive(1)
    sweep.sees_all = False
    sweep.look_up(1, 0, 2 * PAGE, PAGE)
    assert sweep.losses(1) == []
    made = attribute(Lengths(9, 8, 8, 0), CacheKind(PAGE), sweep.losses(1))
    assert made.losses == (Loss(Cause.UNEXPLAINED, 2 * PAGE, 0),)
