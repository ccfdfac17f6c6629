"""Prompts from block ids: lengths, sharing, siblings, tails, own history, shared heads; and the prefix index."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_cache.prefix_index import TokenIds, TokenPrefixIndex, common_length
from tests.random_sessions import sessions, turn
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, Turn
from traces.tokens import History, PrefixSharing, TokenBook

BIG = (100, 2**31 - 1)


def _book(
    session: Session,
    *,
    vocab: tuple[int, int] = BIG,
    sharing: PrefixSharing = "session",
    history: History = "recorded",
    seed: int = 1,
) -> TokenBook:
    return TokenBook(session, seed=seed, vocab=vocab, prefix_sharing=sharing, history=history)


def _session(*turns: Turn, name: str = "s", head: tuple[int, int] = (0, 0), block: int = 4) -> Session:
    return Session(name, block, BlockScope.SESSION, Flow(MAIN_FLOW, turns, *head))


def _ids_in_common(a: Turn, b: Turn) -> int:
    n = min(len(a.block_ids), len(b.block_ids))
    differs = np.flatnonzero(a.block_ids[:n] != b.block_ids[:n])
    return int(differs[0]) if len(differs) else n


@settings(max_examples=150, deadline=None)
@given(sessions(), st.sampled_from(["session", "tools+system"]), st.integers(24, 300))
def test_prompts_share_the_blocks_that_their_ids_share(
    session: Session, sharing: Literal["session", "tools+system"], vocab_size: int
) -> None:
    # Small vocabularies: siblings must differ by rule, not by luck.
    book = _book(session, sharing=sharing, vocab=(0, vocab_size))
    prompts = [(t, book.prompt(f.name, t.index)) for f, t in session.turns_in_arrival_order()]
    for t, tokens in prompts:
        assert tokens.dtype == np.int32
        assert tokens.shape == (t.prompt_tokens,)
        assert tokens.min() >= 0
        assert tokens.max() < vocab_size
    for a, a_tokens in prompts:
        for b, b_tokens in prompts:
            blocks = _ids_in_common(a, b)
            common = common_length(a_tokens, b_tokens)
            assert common >= blocks * session.block_size
            if blocks < min(len(a.block_ids), len(b.block_ids)) and sharing == "session":
                assert common == blocks * session.block_size, "siblings must differ in their first token"


@settings(max_examples=100, deadline=None)
@given(sessions(), st.data())
def test_recorded_prompts_do_not_depend_on_the_order_of_calls(session: Session, data: st.DataObject) -> None:
    keys = [(f.name, t.index) for f, t in session.turns_in_arrival_order()]
    first = _book(session)
    expected = {key: first.prompt(*key) for key in keys}
    second = _book(session)
    for key in data.draw(st.permutations(keys)):
        np.testing.assert_array_equal(second.prompt(*key), expected[key])
        second.record_output(*key, np.full(3, 7, dtype=np.int32))


def test_same_tokens_in_another_process() -> None:
    code = (
        "from traces import open_trace; from traces.tokens import TokenBook;"
        "s = next(open_trace('generated:preset=tiny,sessions=1,seed=4'));"
        "b = TokenBook(s, seed=9, vocab=(0, 1000), prefix_sharing='tools+system', history='recorded');"
        "print(b.prompt('main', 0).tolist())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_seed_and_session_change_the_tokens() -> None:
    one, other = _session(turn(0, [1, 2], 9), name="one"), _session(turn(0, [1, 2], 9), name="other")
    assert common_length(_book(one).prompt("main", 0), _book(other).prompt("main", 0)) == 0
    assert common_length(_book(one).prompt("main", 0), _book(one, seed=2).prompt("main", 0)) == 0


def test_tail_is_the_beginning_of_the_first_child() -> None:
    session = _session(turn(0, [1], 7, start_s=0), turn(1, [1, 2], 9, start_s=1), turn(2, [1, 3], 8, start_s=2))
    book = _book(session)
    first, second, third = (book.prompt("main", k) for k in range(3))
    assert common_length(first, second) == 7
    assert common_length(first, third) == 4
    assert first[4] != third[4]


def test_more_children_than_tokens_still_differ() -> None:
    turns = (turn(k, [1, 10 + k], 64, start_s=k) for k in range(20))
    book = _book(_session(*turns, block=32), vocab=(0, 5))
    assert len({book.prompt("main", k).tobytes() for k in range(20)}) == 20


def test_sessions_of_one_setup_share_their_head_and_nothing_more() -> None:
    turns = (turn(0, [1, 2, 3], 14),)
    a, b = _session(*turns, name="a", head=(5, 2)), _session(*turns, name="b", head=(5, 2))
    c = _session(*turns, name="c", head=(2, 5))
    shared = [_book(s, sharing="tools+system").prompt("main", 0) for s in (a, b, c)]
    assert common_length(shared[0], shared[1]) == 7
    assert common_length(shared[0], shared[2]) == 0
    assert common_length(_book(a).prompt("main", 0), _book(b).prompt("main", 0)) == 0


@pytest.mark.parametrize("seed", range(8))
def test_siblings_of_the_shared_head_differ_from_it(seed: int) -> None:
    # With two tokens there is exactly one left for the sibling.
    session = _session(turn(0, [1], 4, start_s=0), turn(1, [2], 4, start_s=1), head=(3, 0))
    book = _book(session, vocab=(0, 2), sharing="tools+system", seed=seed)
    assert book.prompt("main", 0)[0] != book.prompt("main", 1)[0]


def test_global_ids_mean_the_same_blocks_in_every_session() -> None:
    def one(name: str, ids: list[int], prompt: int) -> TokenIds:
        session = Session(name, 4, BlockScope.GLOBAL, Flow(MAIN_FLOW, (turn(0, ids, prompt),)))
        return _book(session, vocab=(50, 80)).prompt("main", 0)

    assert common_length(one("1", [5, 6], 10), one("2", [5, 6], 8)) == 8
    assert common_length(one("1", [5, 6], 10), one("3", [5, 7], 8)) == 4
    assert common_length(one("1", [5, 6], 11), one("4", [5, 6], 11)) < 11


OWN = np.array([11, 12, 13, 14, 15, 16], dtype=np.int32)


def test_own_output_becomes_the_history_of_the_continuing_turn() -> None:
    session = _session(turn(0, [1], 6, start_s=0), turn(1, [1, 2, 3], 14, start_s=1), turn(2, [1, 9], 9, start_s=2))
    book = _book(session, history="own")
    before = book.prompt("main", 0)
    book.record_output("main", 0, OWN)
    after = book.prompt("main", 1)
    assert len(after) == 14
    np.testing.assert_array_equal(after[:6], before)
    np.testing.assert_array_equal(after[6:12], OWN)
    np.testing.assert_array_equal(after[12:], _book(session).prompt("main", 1)[12:])


def test_sent_blocks_never_change() -> None:
    session = _session(*(turn(k, [1, 2], 10, start_s=k) for k in range(3)), turn(3, [1], 5, start_s=3))
    book = _book(session, history="own")
    sent = book.prompt("main", 0)
    book.record_output("main", 3, OWN)  # an answer to block 1, whose child 2 was sent already
    np.testing.assert_array_equal(book.prompt("main", 1)[:10], sent)


def test_latest_answer_wins_before_a_block_is_sent() -> None:
    session = _session(turn(0, [1], 4, start_s=0), turn(1, [1], 4, start_s=1), turn(2, [1, 2], 8, start_s=2))
    book = _book(session, history="own")
    for k in (0, 1):
        book.prompt("main", k)
        book.record_output("main", k, OWN[k : k + 4])
    np.testing.assert_array_equal(book.prompt("main", 2)[4:], OWN[1:5])


def test_answer_continues_through_a_sent_block_that_it_repeats() -> None:
    session = _session(turn(0, [1], 6, start_s=0), turn(1, [1, 2], 8, start_s=1), turn(2, [1, 2, 3], 12, start_s=2))
    book = _book(session, history="own")
    book.prompt("main", 0)
    book.record_output("main", 0, OWN[:2])
    book.prompt("main", 1)
    book.record_output("main", 0, OWN)  # the same answer again, longer: block 2 agrees, block 3 is free
    np.testing.assert_array_equal(book.prompt("main", 2)[6:], OWN)


def test_sibling_makes_way_for_an_answer_that_begins_like_it() -> None:
    session = _session(turn(0, [1], 4, start_s=0), turn(1, [1, 2], 8, start_s=1), turn(2, [1, 3], 8, start_s=2))
    later = int(_book(session).prompt("main", 2)[4])
    book = _book(session, history="own")
    book.prompt("main", 0)
    book.record_output("main", 0, np.array([later, 1, 2, 3], dtype=np.int32))
    continued, branched = book.prompt("main", 1), book.prompt("main", 2)
    assert continued[4] == later
    assert branched[4] != later
    np.testing.assert_array_equal(book.prompt("main", 2), branched)


def test_answers_leave_the_shared_head_alone() -> None:
    session = _session(turn(0, [1], 6, start_s=0), turn(1, [1, 2, 3], 12, start_s=1), head=(8, 2))
    book = _book(session, history="own", sharing="tools+system")
    book.prompt("main", 0)
    book.record_output("main", 0, OWN)
    np.testing.assert_array_equal(book.prompt("main", 1), _book(session, sharing="tools+system").prompt("main", 1))


@settings(max_examples=100, deadline=None)
@given(sessions(), st.sampled_from(["session", "tools+system"]))
def test_recorded_answers_as_own_history_give_the_recorded_prompts(
    session: Session, sharing: Literal["session", "tools+system"]
) -> None:
    recorded, own = _book(session, sharing=sharing), _book(session, sharing=sharing, history="own")
    for flow, t in session.turns_in_arrival_order():
        np.testing.assert_array_equal(own.prompt(flow.name, t.index), recorded.prompt(flow.name, t.index))
        own.record_output(flow.name, t.index, recorded.continuation(flow.name, t.index, t.output_tokens))


def test_long_conversation_costs_its_distinct_blocks_only() -> None:
    # 2,000 turns of up to 10,000 blocks: all prompts together are 0.64 G tokens, the distinct ones 0.64 M.
    ids = np.arange(1, 10_001, dtype=np.int64)
    turns = (Turn(k, float(k), 64 * 5 * (k + 1), 5, ids[: 5 * (k + 1)]) for k in range(2_000))
    session = _session(*turns, block=64)
    tracemalloc.start()
    book = _book(session, history="own")
    for k in (0, 500, 1_999):
        assert len(book.prompt("main", k)) == session.main.turns[k].prompt_tokens
        book.record_output("main", k, OWN)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 20_000_000


@pytest.mark.parametrize("vocab", [(0, 1), (5, 5), (-1, 9), (0, 2**31 + 1)])
def test_vocabulary_must_hold_two_int32_tokens(vocab: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="vocab must be"):
        _book(_session(turn(0, [1], 4)), vocab=vocab)


_SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=12)


@given(_SEQUENCES, st.lists(st.integers(0, 2), max_size=12))
def test_index_finds_the_longest_known_prefix(inserted: list[list[int]], query: list[int]) -> None:
    index = TokenPrefixIndex()
    for sequence in inserted:
        index.insert(np.array(sequence, dtype=np.int32))
    prefixes = {tuple(sequence[:n]) for sequence in inserted for n in range(len(sequence) + 1)} | {()}
    expected = max(n for n in range(len(query) + 1) if tuple(query[:n]) in prefixes)
    assert index.longest_prefix(np.array(query, dtype=np.int32)) == expected
    assert len(index) == len(prefixes) - 1


def test_index_keeps_no_reference_to_the_callers_array() -> None:
    index = TokenPrefixIndex()
    tokens = np.array([1, 2, 3], dtype=np.int32)
    index.insert(tokens)
    tokens[:] = 9
    assert index.longest_prefix(np.array([1, 2, 3], dtype=np.int32)) == 3


def test_index_refuses_other_arrays() -> None:
    with pytest.raises(ValueError, match="1-d int32"):
        TokenPrefixIndex().insert(np.array([1, 2], dtype=np.int64))
