"""A cause made on purpose is found: one of the eight of ``eval.bench.planted_causes``, on the shared server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.bench import planted_workloads as workloads
from eval.bench.planted_causes import Result, Served, against, alignment_loss, as_json, as_markdown, play
from tests.servers import TinyServer
from traces.model import MAIN_FLOW
from traces.replay.given import GivenFlow, GivenTurn, given_prompts
from traces.replay.metrics import over_time, read_metrics

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.mark.server
@pytest.mark.timeout(600)
def test_a_nonce_in_the_system_prompt_is_found(tiny_server: TinyServer, tmp_path: Path) -> None:
    """Without cache events, too: what clients change in their texts needs none."""
    server = Served(tiny_server.url, tmp_path, has_events=False)
    work = workloads.nonce(workloads.renderer(tiny_server.checkpoint), turns=4)
    kept = play(server, "kept", work.control)
    found = against(server, "planted", "nonce", work, kept)
    assert found.good, found
    # the server's counters, on the run's clock: tokens were in use
    samples = read_metrics(tmp_path / "planted")
    assert max(value for _, value in over_time(samples, "sglang:max_total_num_tokens")) > 0
    assert [s.at_s for s in samples] == sorted(s.at_s for s in samples)


def test_alignment_is_computed_from_the_prompts() -> None:
    first = list(range(100))
    turns = [first, [*first[:70], *range(200, 300)], first]
    given = given_prompts({"s": {MAIN_FLOW: GivenFlow([GivenTurn(turn) for turn in turns])}})
    assert alignment_loss(given, 64) == 0 + 70 % 64 + 99 % 64


def test_stored_results_are_good_and_what_the_code_writes() -> None:
    file = REPOSITORY / "docs" / "results" / "planted-causes.json"
    document = json.loads(file.read_text())
    rows = [{k: v for k, v in row.items() if k not in ("off_by", "good")} for row in document["runs"]]
    results = [Result(**row) for row in rows]
    assert {result.plant for result in results} >= {
        "small cache", "page 256", "parallel subagents", "gate", "offload refused", "think block dropped",
        "argument order changed", "nonce in the system prompt",
    }  # fmt: skip
    assert all(result.good for result in results)
    assert as_json(results)["runs"] == document["runs"]
    assert as_markdown(document) == file.with_suffix(".md").read_text()
