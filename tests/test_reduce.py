"""What reductions keep, and what they say they dropped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.bench.theory_scan import prefix_lengths
from radix_cache.theory import SharedPrefixes
from tests.random_sessions import sessions, turn
from traces import open_trace
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, TraceError
from traces.reduce import limit_context, reduce_blocks
from traces.tokens import TokenBook


@given(sessions(), st.data())
def test_reduction_keeps_blocks_order_and_times(session: Session, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, session.block_size))
    reduced = reduce_blocks(session, k)
    assert reduced.block_size == k
    assert [f.name for f in reduced.flows()] == [f.name for f in session.flows()]
    pairs = zip(session.turns_in_arrival_order(), reduced.turns_in_arrival_order(), strict=True)
    for (flow, old), (reduced_flow, new) in pairs:
        assert (flow.name, old.index, old.start_s, old.think_s, old.stop) == (
            reduced_flow.name,
            new.index,
            new.start_s,
            new.think_s,
            new.stop,
        )
        np.testing.assert_array_equal(new.block_ids, old.block_ids)
        assert new.prompt_tokens // k == len(new.block_ids)
        assert new.prompt_tokens == pytest.approx(old.prompt_tokens * k / session.block_size, abs=1)
        assert (new.output_tokens == 0) == (old.output_tokens == 0)
        assert new.output_tokens == pytest.approx(old.output_tokens * k / session.block_size, abs=1)


@given(sessions(), st.data())
def test_reduction_keeps_every_common_prefix_in_blocks(session: Session, data: st.DataObject) -> None:
    k = data.draw(st.integers(2, session.block_size))
    before = [found for _, found in prefix_lengths(session, SharedPrefixes())]
    reduced = reduce_blocks(session, k)
    after = [found for _, found in prefix_lengths(reduced, SharedPrefixes())]
    for (_, turn_before), old, new in zip(session.turns_in_arrival_order(), before, after, strict=True):
        blocks = len(turn_before.block_ids)
        assert min(old.session // session.block_size, blocks) == min(new.session // k, blocks)


def test_reduced_prompts_can_be_built() -> None:
    session = reduce_blocks(next(open_trace("generated:sessions=1,seed=2")), 2)
    book = TokenBook(session, seed=1, vocab=(0, 500), prefix_sharing="session", history="recorded")
    for flow, t in session.turns_in_arrival_order():
        assert len(book.prompt(flow.name, t.index)) == t.prompt_tokens


def test_lengths_worked_out_by_hand() -> None:
    turns = (turn(0, [], 7, 0), turn(1, [1, 2], 64 * 2 + 33, 3), turn(2, [1, 2, 3], 64 * 3 + 63, 700))
    flow = Flow(MAIN_FLOW, turns, tool_tokens=130, system_tokens=20)
    reduced = reduce_blocks(Session("s", 64, BlockScope.SESSION, flow), 4)
    assert [(t.prompt_tokens, t.output_tokens) for t in reduced.main.turns] == [(1, 0), (10, 1), (15, 44)]
    assert (reduced.main.tool_tokens, reduced.main.system_tokens) == (8, 1)


@pytest.mark.parametrize("k", [0, 1, 65])
def test_block_size_out_of_range(k: int) -> None:
    session = Session("s", 64, BlockScope.SESSION, Flow(MAIN_FLOW, (turn(0, [], 7),)))
    with pytest.raises(ValueError, match=r"session s: tokens per block must be from 2 to .* 64"):
        reduce_blocks(session, k)


def _session() -> Session:
    main = Flow(MAIN_FLOW, tuple(turn(k, [], prompt, 2, k) for k, prompt in enumerate([5, 50, 6, 7])))
    early = Flow("early", (turn(0, [], 4, 1, 0.5), turn(1, [], 90, 1, 0.7)), spawn_after=0)
    late = Flow("late", (turn(0, [], 4, 1, 2.5),), spawn_after=2)
    return Session("s", 128, BlockScope.SESSION, main, (early, late), source="trace.json")


def test_end_flow_drops_the_rest_of_the_flow_and_what_it_would_have_started() -> None:
    kept, dropped = limit_context(_session(), 20, "end-flow")
    assert kept is not None
    assert [t.index for t in kept.main.turns] == [0]
    assert [(f.name, [t.index for t in f.turns]) for f in kept.subagents] == [("early", [0])]
    assert [(d.session, d.flow, d.turn) for d in dropped] == [
        ("s", "main", 1),
        ("s", "main", 2),
        ("s", "main", 3),
        ("s", "early", 1),
        ("s", "late", 0),
    ]
    assert dropped[0].reason == "prompt of 50 and output of 2 tokens exceed the context of 20"
    assert dropped[1].reason == "its flow was ended before turn 1"
    assert "turn 2 of the main flow, which started it" in dropped[4].reason


def test_drop_turn_leaves_out_single_turns() -> None:
    kept, dropped = limit_context(_session(), 20, "drop-turn")
    assert kept is not None
    assert [t.index for t in kept.main.turns] == [0, 2, 3]
    assert [f.name for f in kept.subagents] == ["early", "late"]
    assert [(d.flow, d.turn) for d in dropped] == [("main", 1), ("early", 1)]


def test_fail_names_the_turn() -> None:
    with pytest.raises(TraceError, match=r"trace\.json, session s, turn 1, field 'in': prompt of 50"):
        limit_context(_session(), 20, "fail")


def test_session_that_fits_is_returned_as_it_is() -> None:
    session = _session()
    assert limit_context(session, 91, "fail") == (session, [])
    # One token less and the longest request does not fit.
    assert limit_context(session, 90, "drop-turn")[1] != []


def test_nothing_left() -> None:
    kept, dropped = limit_context(_session(), 3, "end-flow")
    assert kept is None
    assert len(dropped) == 7


def test_context_must_hold_a_request() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        limit_context(_session(), 1, "fail")
