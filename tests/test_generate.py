"""Generated sessions: valid, reproducible, and with the statistics of recorded ones."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from radix_cache.theory import common_blocks
from traces import ReadStats, Session, StopReason, TraceError, open_trace
from traces.write import write_weka


@dataclass
class _Statistics:
    """Of main flows, as the notes on recorded sessions count them."""

    turns: list[int] = field(default_factory=list)
    pairs: int = 0
    appended: int = 0
    pulled_back: int = 0
    gaps: dict[StopReason, list[float]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[StopReason, list[int]] = field(default_factory=lambda: defaultdict(list))
    ended: dict[StopReason, list[bool]] = field(default_factory=lambda: defaultdict(list))
    heads: list[tuple[int, int]] = field(default_factory=list)

    def add(self, session: Session) -> None:
        turns = session.main.turns
        self.turns.append(len(turns))
        self.heads.append((session.main.tool_tokens, session.main.system_tokens))
        for at, turn in enumerate(turns):
            self.outputs[turn.stop].append(turn.output_tokens)
            self.ended[turn.stop].append(at == len(turns) - 1)
            if at == 0:
                continue
            before = turns[at - 1]
            kept = common_blocks(before.block_ids, turn.block_ids)
            self.pairs += 1
            self.appended += kept == len(before.block_ids)
            self.pulled_back += kept < 0.9 * len(before.block_ids)
            self.gaps[before.stop].append(turn.start_s - before.start_s - (before.api_s or 0.0))


@pytest.fixture(scope="module")
def statistics() -> _Statistics:
    found = _Statistics()
    for session in open_trace("generated:sessions=400,seed=3"):
        found.add(session)
    return found


def test_most_turns_append_and_few_pull_back(statistics: _Statistics) -> None:
    assert statistics.appended / statistics.pairs == pytest.approx(0.93, abs=0.01)
    assert statistics.pulled_back / statistics.pairs == pytest.approx(0.019, abs=0.004)


def test_gaps_depend_on_why_the_last_answer_ended(statistics: _Statistics) -> None:
    tool, user = statistics.gaps[StopReason.TOOL_USE], statistics.gaps[StopReason.END_TURN]
    assert np.median(tool) == pytest.approx(9, rel=0.1)
    assert np.percentile(tool, 90) == pytest.approx(71, rel=0.2)
    assert np.median(user) == pytest.approx(210, rel=0.2)
    assert np.percentile(user, 90) == pytest.approx(2_980, rel=0.25)


def test_sessions_end_after_an_answer_to_the_user(statistics: _Statistics) -> None:
    assert np.mean(statistics.ended[StopReason.END_TURN]) == pytest.approx(0.13, abs=0.025)
    assert np.mean(statistics.ended[StopReason.TOOL_USE]) == pytest.approx(0.008, abs=0.002)
    assert np.mean(statistics.turns) == pytest.approx(72, rel=0.2)


def test_lengths_of_answers_and_heads(statistics: _Statistics) -> None:
    assert np.median(statistics.outputs[StopReason.TOOL_USE]) == pytest.approx(208, rel=0.1)
    assert np.percentile(statistics.outputs[StopReason.TOOL_USE], 90) == pytest.approx(921, rel=0.15)
    assert np.median(statistics.outputs[StopReason.END_TURN]) == pytest.approx(398, rel=0.15)
    tools, system = np.mean(statistics.heads, axis=0)
    assert tools == pytest.approx(13_000, rel=0.2)
    assert system == pytest.approx(3_000, rel=0.3)
    assert len(set(statistics.heads)) == 8, "sessions share a few set-ups"


def _same(a: Session, b: Session) -> None:
    assert replace(a, main=b.main, subagents=b.subagents, source=b.source) == b
    for left, right in zip(a.flows(), b.flows(), strict=True):
        assert replace(left, turns=(), start_s=0.0) == replace(right, turns=(), start_s=0.0)
        assert left.start_s == pytest.approx(right.start_s, abs=0.002)
        for x, y in zip(left.turns, right.turns, strict=True):
            np.testing.assert_array_equal(x.block_ids, y.block_ids)
            assert x.start_s == pytest.approx(y.start_s, abs=0.002)
            empty = x.block_ids[:0]
            assert replace(x, block_ids=empty, start_s=0.0) == replace(y, block_ids=empty, start_s=0.0)


@pytest.mark.parametrize("settings", ["sessions=12,seed=5,subagent_rate=0.02", "preset=tiny,sessions=30"])
def test_what_is_written_is_valid_and_reads_back_the_same(settings: str, tmp_path: Path) -> None:
    generated = list(open_trace(f"generated:{settings}"))
    for session in generated:
        write_weka(session, tmp_path / f"{session.id}.json")
    stats = ReadStats()
    read = list(open_trace(str(tmp_path), stats=stats))
    assert len(read) == len(generated)
    assert any(session.subagents for session in read)
    for a, b in zip(generated, read, strict=True):
        _same(a, b)


def test_subagents_of_a_session_share_their_head_and_mostly_run_in_the_background() -> None:
    sessions = list(open_trace("generated:sessions=60,seed=5,subagent_rate=0.02"))
    flows = [(session, flow) for session in sessions for flow in session.subagents]
    assert all(flow.spawn_after is not None for _, flow in flows)
    background = [
        flow.spawn_after is not None
        and flow.duration_s is not None
        and flow.spawn_after + 1 < len(session.main.turns)
        and flow.start_s + flow.duration_s > session.main.turns[flow.spawn_after + 1].start_s
        for session, flow in flows
    ]
    assert np.mean(background) > 0.5
    several = next(session for session in sessions if len(session.subagents) > 1)
    first, second = several.subagents[:2]
    head = (first.tool_tokens + first.system_tokens) // several.block_size
    assert common_blocks(first.turns[0].block_ids, second.turns[0].block_ids) == head
    assert common_blocks(first.turns[0].block_ids, several.main.turns[0].block_ids) == 0


def test_a_session_depends_on_seed_and_number_only() -> None:
    few = list(open_trace("generated:sessions=2,seed=7"))
    many = list(open_trace("generated:sessions=5,seed=7"))
    other = next(open_trace("generated:sessions=1,seed=8"))
    for a, b in zip(few, many, strict=False):
        _same(a, b)
    assert [t.prompt_tokens for t in other.main.turns] != [t.prompt_tokens for t in few[0].main.turns]


def test_tiny_preset_fits_the_tiny_context() -> None:
    sessions = list(open_trace("generated:preset=tiny,sessions=300,seed=2"))
    assert max(session.max_context for session in sessions) <= 4_096
    assert max(len(session.main.turns) for session in sessions) == 12
    assert sum(len(session.subagents) for session in sessions) > 20


def test_settings_change_the_preset() -> None:
    session = next(open_trace("generated:preset=tiny,block_size=32,max_turns=3"))
    assert session.block_size == 32
    assert len(session.main.turns) <= 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("generated:sessions=0", r"field 'sessions': .* greater than or equal to 1"),
        ("generated:sessions=many", r"field 'sessions': .* integer"),
        ("generated:colour=red", r"field 'colour': .*settings are sessions, seed, scale"),
        ("generated:preset=huge", "unknown preset 'huge'; known are default, tiny"),
        ("generated:20", "'20' is not name=value"),
    ],
)
def test_wrong_settings(path: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        open_trace(path)
