"""The pure parts of a replay: when a turn is ready, which turns are sent, what a prompt shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.model import BlockScope, Flow, Session, Turn
from traces.replay.ledger import PrefixLedger
from traces.replay.schedule import Think, joined_flows, recorded_think_s, spawning_turn
from traces.replay.select import Limits, first_requests, select, shorten


def turn(index: int, start: float = 0.0, *, blocks: int = 1, out: int = 8, **more: float | None) -> Turn:
    ids = np.arange(blocks, dtype=np.int64)
    return Turn(index, start, prompt_tokens=blocks * 64 + 5, output_tokens=out, block_ids=ids, **more)  # type: ignore[arg-type]


def session(main: list[Turn], *subagents: Flow, name: str = "s") -> Session:
    return Session(name, 64, BlockScope.SESSION, Flow("main", tuple(main)), subagents)


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("recorded", 100.0),
        ("none", 0.0),
        ("scaled:0.25", 25.0),
        ("capped:60", 60.0),
        ("capped:200", 100.0),
        ("scaled:0.5,capped:40", 40.0),
        ("scaled:0.25,capped:40", 25.0),
    ],
)
def test_think_modes(text: str, waits: float) -> None:
    assert Think.parse(text).wait_s(100.0) == waits


@pytest.mark.parametrize(
    "text",
    [
        "",
        "scaled",
        "scaled:",
        "scaled:x",
        "scaled:-1",
        "capped:nan",
        "none:1",
        "fast",
        ",capped:1",
        "scaled:1,",
        "capped:1,scaled:1",
    ],
)
def test_unreadable_think_says_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError, match="capped:SECONDS"):
        Think.parse(text)


def test_missing_think_time_comes_from_arrivals_less_serving_time() -> None:
    s = session([turn(0, 0.0, api_s=4.0), turn(1, 10.0), turn(2, 30.0, think_s=3.0), turn(3, 31.0)])
    assert [recorded_think_s(s, s.main, k) for k in range(4)] == [0.0, 6.0, 3.0, 0.0]


def test_overlapping_turns_wait_nothing() -> None:
    s = session([turn(0, 0.0, api_s=40.0), turn(1, 10.0)])
    assert recorded_think_s(s, s.main, 1) == 0.0


def test_subagent_waits_from_the_turn_that_spawned_it() -> None:
    spawned = Flow("a", (turn(0, 9.0),), spawn_after=0)
    with_session = Flow("b", (turn(0, 2.5),))
    s = session([turn(0, 0.0, api_s=5.0), turn(1, 20.0)], spawned, with_session)
    assert spawning_turn(s, spawned) == 0
    assert recorded_think_s(s, spawned, 0) == 4.0
    assert spawning_turn(s, with_session) is None
    assert recorded_think_s(s, with_session, 0) == 2.5


def test_a_dropped_spawner_is_replaced_and_no_turn_waits_for_its_own_child() -> None:
    child = Flow("a", (turn(0, 1.0),), spawn_after=1, join_before=2)
    s = session([turn(0), turn(2, 2.0), turn(3, 3.0)], child)  # turn 1 was dropped: turn 2 spawns now
    assert spawning_turn(s, child) == 1
    assert joined_flows(s, 1) == []
    last = session([turn(0)], Flow("a", (turn(0, 1.0),), spawn_after=4, join_before=5))
    assert spawning_turn(last, last.subagents[0]) == 0


def test_a_join_moves_to_the_next_turn_kept() -> None:
    child = Flow("a", (turn(0, 1.0),), spawn_after=0, join_before=2)
    s = session([turn(0), turn(1, 1.0), turn(3, 3.0)], child)
    assert [len(joined_flows(s, k)) for k in range(3)] == [0, 0, 1]


def test_shorten_drops_the_subagents_of_turns_that_are_gone() -> None:
    early, late = Flow("a", (turn(0), turn(1)), spawn_after=0), Flow("b", (turn(0),), spawn_after=2)
    short = shorten(session([turn(0, out=100), turn(1), turn(2)], early, late), 1, 10)
    assert [flow.name for flow in short.flows()] == ["main", "a"]
    assert [len(flow.turns) for flow in short.flows()] == [1, 1]
    assert short.main.turns[0].output_tokens == 10


@settings(deadline=None)
@given(st.integers(1, 12))
def test_first_requests_keeps_that_many_in_order_of_arrival(count: int) -> None:
    child = Flow("a", tuple(turn(k, 1.5 + k) for k in range(3)), spawn_after=1)
    s = session([turn(k, float(k)) for k in range(5)], child)
    cut = first_requests(s, count)
    assert cut.request_count == min(count, 8)
    kept = {(flow.name, t.index) for flow, t in cut.turns_in_arrival_order()}
    assert kept == {(flow.name, t.index) for flow, t in s.turns_in_arrival_order()[:count]}


def many(count: int) -> list[Session]:
    return [session([turn(k, float(k), blocks=1 + k) for k in range(4)], name=f"s{n}") for n in range(count)]


def test_select_stops_at_its_limits_and_reads_no_further() -> None:
    source = iter(many(10))
    assert [s.id for s in select(source, Limits(sessions=3)).sessions] == ["s0", "s1", "s2"]
    assert next(source).id == "s3"
    by_requests = select(many(10), Limits(requests=6))
    assert (by_requests.requests, [s.request_count for s in by_requests.sessions]) == (6, [4, 2])


def test_shuffle_is_seeded() -> None:
    orders = [tuple(s.id for s in select(many(9), Limits(shuffle=True, seed=n)).sessions) for n in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[2]) == sorted(s.id for s in many(9))


def test_digest_tells_what_is_sent_apart() -> None:
    base = select(many(3), Limits())
    assert base.sha256 == select(many(3), Limits()).sha256
    for other in (Limits(max_turns=3), Limits(max_output=4), Limits(sessions=2), Limits(tokens_per_block=8)):
        assert select(many(3), other).sha256 != base.sha256


def test_context_limit_reports_what_it_dropped() -> None:
    chosen = select(many(2), Limits(max_context=64 * 3 + 5 + 8))
    assert [s.request_count for s in chosen.sessions] == [3, 3]
    assert [(d.session, d.flow, d.turn) for d in chosen.dropped] == [("s0", "main", 3), ("s1", "main", 3)]
    nothing = select(many(2), Limits(max_context=10))
    assert (nothing.sessions, nothing.emptied) == ([], ["s0", "s1"])


def test_mixed_block_sizes_are_refused() -> None:
    odd = Session("odd", 32, BlockScope.SESSION, Flow("main", (turn(0),)))
    with pytest.raises(ValueError, match="session odd has blocks of 32 tokens"):
        select([*many(1), odd], Limits())


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_ledger_by_hand() -> None:
    ledger = PrefixLedger()
    assert tuple(ledger.sent("a", ids(1, 2, 3))) == (0, 0, 0, 0, 0)
    # Sent, not computed: instant insertion counts it, "ready" does not.
    assert tuple(ledger.sent("b", ids(1, 2, 9))) == (0, 0, 2, 2, 0)
    ledger.first_token(ids(1, 2, 3))
    ledger.ended("a", ids(1, 2, 3), ids(4, 5, 6))
    # The last output token (6) has no KV.
    assert tuple(ledger.sent("a", ids(1, 2, 3, 4, 5, 6, 7))) == (3, 5, 3, 5, 5)
    assert tuple(ledger.sent("b", ids(1, 2, 3, 4, 8))) == (2, 2, 4, 4, 4)


def test_ledger_forgets_a_session_but_not_its_tokens() -> None:
    ledger = PrefixLedger()
    ledger.sent("a", ids(1, 2, 3))
    ledger.forget("a")
    assert tuple(ledger.sent("a", ids(1, 2, 3))) == (0, 0, 3, 3, 0)


def test_a_single_output_token_leaves_nothing_and_unknown_ids_count_as_none() -> None:
    ledger = PrefixLedger()
    ledger.sent("a", ids(1, 2))
    ledger.ended("a", ids(1, 2), ids(3))
    ledger.ended("a", ids(1, 2), None)
    assert ledger.sent("a", ids(1, 2, 3, 4)).session_output_lcp == 2


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.data())
def test_ledger_against_brute_force(prompts: list[list[int]], data: st.DataObject) -> None:
    ledger, before = PrefixLedger(), []  # type: ignore[var-annotated]

    def longest(prompt: list[int], sequences: list[list[int]]) -> int:
        def common(other: list[int]) -> int:
            pairs = zip(prompt, other, strict=False)
            return next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(prompt), len(other)))

        return max(map(common, sequences), default=0)

    for prompt in prompts:
        owner = data.draw(st.sampled_from("ab"))
        found = ledger.sent(owner, ids(*prompt))
        own = [entry for entry in before if entry[0] == owner]
        assert found.session_lcp == longest(prompt, [p for _, p, _ in own])
        assert found.session_output_lcp == longest(prompt, [p + o[:-1] for _, p, o in own])
        assert found.shared_lcp == longest(prompt, [p for _, p, _ in before])
        assert found.shared_output_lcp == longest(prompt, [p + o[:-1] for _, p, o in before])
        assert found.ready_lcp == found.shared_output_lcp  # here every request ends before the next is sent
        output = data.draw(st.lists(st.integers(0, 2), max_size=5))
        ledger.first_token(ids(*prompt))
        ledger.ended(owner, ids(*prompt), ids(*output))
        before.append((owner, prompt, output))
