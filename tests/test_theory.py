"""Block-level theory against real tokens, and the streaming scan of whole traces."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.bench.theory_scan import prefix_lengths, scan_trace
from radix_cache.prefix_index import TokenIds, TokenPrefixIndex
from radix_cache.theory import PrefixLengths, PromptShape, SessionScan, SharedPrefixes, known_prefix
from tests.random_sessions import sessions, turn
from traces import open_trace
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, Turn
from traces.tokens import TokenBook
from traces.write import write_weka

VOCAB = (0, 2**31 - 1)  # so large that different blocks do not agree by chance


class _Indexes:
    """The four prefix lengths measured on tokens, by the definition of each."""

    def __init__(self) -> None:
        self.shared, self.shared_output = TokenPrefixIndex(), TokenPrefixIndex()
        self.new_session()

    def new_session(self) -> None:
        self.session, self.session_output = TokenPrefixIndex(), TokenPrefixIndex()

    def add(self, prompt: TokenIds, computed: TokenIds) -> PrefixLengths:
        """``computed``: the prompt and those output tokens whose KV exists."""
        found = PrefixLengths(
            *(index.longest_prefix(prompt) for index in (self.session, self.session_output)),
            *(index.longest_prefix(prompt) for index in (self.shared, self.shared_output)),
        )
        self.session.insert(prompt)
        self.shared.insert(prompt)
        self.session_output.insert(computed)
        self.shared_output.insert(computed)
        return found


def _measured(trace: list[Session]) -> list[list[PrefixLengths]]:
    indexes = _Indexes()
    lengths: list[list[PrefixLengths]] = []
    for session in trace:
        indexes.new_session()
        book = TokenBook(session, seed=5, vocab=VOCAB, prefix_sharing="tools+system", history="recorded")
        lengths.append([])
        for flow, t in session.turns_in_arrival_order():
            prompt = book.prompt(flow.name, t.index)
            answer = book.continuation(flow.name, t.index, t.output_tokens)
            computed = np.concatenate([prompt, answer[: max(0, t.output_tokens - 1)]])
            lengths[-1].append(indexes.add(prompt, computed))
    return lengths


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3).flatmap(lambda n: st.tuples(*(sessions(name=f"s{i}") for i in range(n)))))
def test_block_level_lengths_equal_lengths_of_tokens(trace: tuple[Session, ...]) -> None:
    shared = SharedPrefixes()
    theory = [[lengths for _, lengths in prefix_lengths(session, shared)] for session in trace]
    assert theory == _measured(list(trace))


def test_lengths_of_a_conversation_worked_out_by_hand() -> None:
    scan = SessionScan(4, SharedPrefixes())

    def add(ids: list[int], prompt: int, output: int) -> tuple[int, int]:
        found = scan.add(PromptShape(np.array(ids, dtype=np.int64), prompt, output))
        return found.session, found.session_output

    assert add([1, 2], 10, 4) == (0, 0)
    # Appends: 8 tokens of full blocks and the tail of 2; of 4 output tokens 3 left KV behind.
    assert add([1, 2, 3], 15, 6) == (10, 13)
    # A retry of the first prompt is there as a whole.
    assert add([1, 2], 10, 4) == (10, 10)
    # A second child of block 1 shares nothing beyond it.
    assert add([1, 9], 8, 1) == (4, 4)
    # Block 3 went on for 3 tokens of prompt and 5 of output: through block 4 into the tail.
    assert add([1, 2, 3, 4], 19, 1) == (15, 19)


def test_long_output_reaches_beyond_a_turn_that_takes_up_only_its_beginning() -> None:
    scan = SessionScan(4, SharedPrefixes())
    scan.add(PromptShape(np.array([1], dtype=np.int64), 4, 12))
    assert scan.add(PromptShape(np.array([1, 2], dtype=np.int64), 8, 0)).session_output == 8
    # 11 tokens of the first output have KV; 4 of them became block 2, so 7 more are there.
    found = scan.add(PromptShape(np.array([1, 2, 3, 4], dtype=np.int64), 16, 1))
    assert (found.session, found.session_output) == (8, 15)


def test_output_of_zero_or_one_tokens_leaves_nothing_behind() -> None:
    for output in (0, 1):
        scan = SessionScan(4, SharedPrefixes())
        scan.add(PromptShape(np.array([1], dtype=np.int64), 6, output))
        assert scan.add(PromptShape(np.array([1, 2], dtype=np.int64), 8, 1)).session_output == 6


def test_sessions_share_only_the_head_of_their_own_setup() -> None:
    shared = SharedPrefixes()
    ids = np.arange(1, 5, dtype=np.int64)

    def first_turn(head: tuple[int, int]) -> PrefixLengths:
        return SessionScan(4, shared).add(PromptShape(ids, 16, 1, head))

    assert first_turn((5, 2)).shared == 0
    assert first_turn((5, 2)).shared == 7
    assert first_turn((2, 5)).shared == 0
    assert first_turn((5, 2)).session == 0


def test_global_ids_match_whole_blocks_of_other_sessions() -> None:
    shared = SharedPrefixes(global_ids=True)
    first = SessionScan(4, shared).add(PromptShape(np.array([7, 8]), 11, 5))
    second = SessionScan(4, shared).add(PromptShape(np.array([7, 8]), 11, 5))
    third = SessionScan(4, shared).add(PromptShape(np.array([7, 9]), 8, 5))
    assert (first.shared, second.shared, third.shared) == (0, 8, 4)
    assert second.session_output == 0


@given(st.lists(st.integers(0, 1000), unique=True, max_size=40), st.integers(0, 40))
def test_known_prefix_finds_where_the_known_ids_end(ids: list[int], cut: int) -> None:
    cut = min(cut, len(ids))
    assert known_prefix(np.array(ids, dtype=np.int64), set(ids[:cut])) == cut


def _trace() -> Iterator[Session]:
    turns = (turn(0, [1], 4, 5, 0.0), turn(1, [1, 2], 11, 5, 1.0))
    yield Session("a", 4, BlockScope.SESSION, Flow(MAIN_FLOW, turns[:1]))
    yield Session("b", 4, BlockScope.SESSION, Flow(MAIN_FLOW, turns))


def test_rate_is_a_ratio_of_sums_and_the_mean_of_rates_another_number() -> None:
    result = scan_trace(_trace(), page_sizes=[1, 4], scope="session", output_inserted=True)
    # Prompts 4, 4 and 11; only the last has a prefix: 4 of prompt and 4 of output tokens.
    assert result.rates[1].rate == pytest.approx(8 / 19)
    assert result.mean_of_rates[1] == pytest.approx(8 / 11 / 3)
    assert scan_trace(_trace(), page_sizes=[4], scope="session", output_inserted=False).rates[4].rate == pytest.approx(
        4 / 19
    )


_PEAK = """
import sys
from eval.bench.theory_scan import scan_trace
from traces import open_trace
result = scan_trace(open_trace(sys.argv[1]), page_sizes=[64], scope="tools+system", output_inserted=True)
print(result.sessions, result.peak_rss_bytes)
"""


def _peak(path: str) -> tuple[int, int]:
    output = subprocess.run([sys.executable, "-c", _PEAK, path], capture_output=True, text=True, check=True)
    sessions_read, peak = output.stdout.split()
    return int(sessions_read), int(peak)


def test_scan_holds_no_collection_in_memory(tmp_path: Path) -> None:
    # 2 MB of ids a session: 40 of them held at once would stand out against 8.
    turns = (Turn(n, float(n), 64 * (4_000 + n), 9, np.arange(1, 4_001 + n, dtype=np.int64)) for n in range(60))
    session = Session("s", 64, BlockScope.SESSION, Flow(MAIN_FLOW, tuple(turns)))
    archives = {}
    for count in (8, 40):
        archives[count] = tmp_path / f"{count}.tar.xz"
        with tarfile.open(archives[count], "w:xz", preset=0) as archive:
            for number in range(count):
                member = tmp_path / f"session{number}.json"
                write_weka(replace(session, id=f"s{number}"), member)
                archive.add(member, member.name)
                member.unlink()
    size = sum(t.block_ids.nbytes for t in session.main.turns)
    few, many = _peak(str(archives[8])), _peak(str(archives[40]))
    assert (few[0], many[0]) == (8, 40)
    assert many[1] - few[1] < 8 * size, "memory grew with the number of sessions (32 more)"


@pytest.mark.real_traces
def test_real_collection_agrees_with_the_published_rate(weka_archive: Path) -> None:
    # 675 sessions of the full collection have 96.52 % at page 64; these are 413 of them.
    trace = open_trace(str(weka_archive), limit=120)
    result = scan_trace(trace, page_sizes=[64], scope="session", output_inserted=True)
    assert result.sessions == 120
    assert 0.955 < result.rates[64].rate < 0.975
