"""``agentserve traces``: what it prints, and the statistics behind it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner, Result

from agentserve.cli import main
from tests.random_sessions import turn
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, Turn
from traces.statistics import TraceStatistics
from traces.write import write_weka


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["traces", *arguments])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Prompts 4, 4 and 11 tokens; only the last has a prefix: 4 of prompt and 4 of output tokens."""
    turns = (turn(0, [1], 4, 5, 0.0), turn(1, [1, 2], 11, 5, 1.0))
    for name, kept in (("a", turns[:1]), ("b", turns)):
        session = Session(name, 4, BlockScope.SESSION, Flow(MAIN_FLOW, kept))
        write_weka(session, tmp_path / f"{name}.json")
    return tmp_path


def test_theory_prints_rate_definition_and_cost(trace: Path) -> None:
    result = _run("theory", str(trace), "--page", "1", "--page", "4")
    assert result.exit_code == 0, result.output
    assert "42.11%" in result.output  # 8 / 19
    for part in ("infinite cache", "per session", "generated tokens inserted", "2 sessions", "peak memory"):
        assert part in " ".join(result.output.split())


def test_theory_without_output(trace: Path) -> None:
    document = orjson.loads(_run("theory", str(trace), "--page", "4", "--no-output", "--json").stdout)
    assert document["pages"]["4"]["rate"] == pytest.approx(4 / 19)
    assert "not inserted" in document["definition"]
    assert (document["sessions"], document["requests"], document["prompt_tokens"]) == (2, 3, 19)


def test_theory_shares_heads_between_sessions() -> None:
    generated = "generated:sessions=12,seed=1,preset=tiny"
    rates = {
        scope: orjson.loads(_run("theory", generated, "--scope", scope, "--json").stdout)["pages"]["64"]["rate"]
        for scope in ("session", "tools+system")
    }
    assert rates["tools+system"] > rates["session"] + 0.01


def test_faulty_session_stops_or_is_skipped(trace: Path) -> None:
    (trace / "c.json").write_text("{")
    stopped = _run("theory", str(trace))
    assert stopped.exit_code == 1
    assert "c.json: not valid JSON" in stopped.output
    skipped = _run("theory", str(trace), "--skip-bad", "--json")
    assert skipped.exit_code == 0
    assert len(orjson.loads(skipped.stdout)["skipped"]) == 1
    assert "skipped: " in skipped.stderr


def test_missing_trace_is_an_error_without_a_traceback() -> None:
    result = _run("stats", "nowhere.json")
    assert result.exit_code == 1
    assert result.output == "Error: nowhere.json: no such file or directory; check the path\n"


def test_stats_prints_tables_and_json(trace: Path) -> None:
    text = _run("stats", str(trace))
    assert text.exit_code == 0, text.output
    assert "2 sessions, 3 requests" in text.output
    document = orjson.loads(_run("stats", str(trace), "--json").stdout)
    assert document["distributions"]["turns"]["mean"] == 1.5
    assert document["duplicates"] == {"identical": 0, "prefixes": 1, "same_beginning": 0}


def _stopped(at: Turn, stop: StopReason, api_s: float) -> Turn:
    return Turn(at.index, at.start_s, at.prompt_tokens, at.output_tokens, at.block_ids, 0.0, api_s, stop)


def test_statistics_worked_out_by_hand() -> None:
    ids = list(range(1, 21))
    turns = (
        _stopped(turn(0, ids, 80, 3, 0.0), StopReason.TOOL_USE, 2.0),
        _stopped(turn(1, [*ids, 21], 86, 3, 10.0), StopReason.END_TURN, 2.0),  # appends, 8 s after the answer
        _stopped(turn(2, [*ids, 22], 84, 3, 11.0), StopReason.TOOL_USE, 2.0),  # loses 1 of 21 blocks, overlaps
        _stopped(turn(3, [1, 2, 30], 12, 3, 20.0), StopReason.END_TURN, 2.0),  # goes far back, after 7 s
    )
    found = TraceStatistics()
    for name in ("x", "y"):
        found.add(Session(name, 4, BlockScope.SESSION, Flow(MAIN_FLOW, turns)))
    found.add(Session("z", 4, BlockScope.SESSION, Flow(MAIN_FLOW, turns[:3])))
    assert (found.pairs, found.appending, found.pulling_back, found.overlapping) == (8, 3, 2, 3)
    endings = found.endings()
    assert (endings[StopReason.TOOL_USE].turns, endings[StopReason.TOOL_USE].ended_session) == (6, 1)
    assert (endings[StopReason.END_TURN].turns, endings[StopReason.END_TURN].ended_session) == (5, 2)
    assert endings[StopReason.TOOL_USE].gap_s.percentiles[50] == pytest.approx(np.median([8, 7, 8, 7, 8]))
    assert found.duplicates() == (1, 1, 2)
    assert found.distributions()["appended"].mean == 6
