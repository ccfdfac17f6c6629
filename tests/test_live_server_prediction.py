"""A real server that is short of memory, gittins on the tiny M3: what the simulator says of its steps, and what
becomes of requests that it takes back."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentserve.runtime.policy_journal import read_journal
from eval.bench.prediction import predictions
from eval.bench.prediction_live import Policy, journal_of, record
from tests.servers import PRESSED_KV_TOKENS, TinyServer
from traces.replay.config import ReplayConfig

pytestmark = pytest.mark.server


def test_the_simulator_predicts_a_server_with_several_requests_in_flight_and_no_answer_changes(
    pressed_server: TinyServer, tiny_server: TinyServer, tmp_path: Path
) -> None:
    settings = ReplayConfig(
        trace="generated:preset=tiny,sessions=8,seed=5", out=pressed_server.folder / "run", url=pressed_server.url,
        concurrency=8, in_flight=3, think="none", max_output=8, max_turns=4, max_context=1300,
    )  # fmt: skip
    live = record(Policy.parse("gittins"), settings)
    assert live.run.header.server.names_sessions
    assert len([event for event in live.run.events if event.kind == "ended" and event.flow is None]) == 8
    said = predictions(live)["server_steps"]
    assert said.overlapping > 0.5 * said.requests
    assert said.live_evicted == said.predicted_evicted > PRESSED_KV_TOKENS
    assert abs(said.points_off) <= 0.3, said.differences
    assert said.same >= 0.95, said.differences
    assert 0.05 < said.live_rate < live.theoretical
    # The same requests on a server without policies that evicts nothing.
    roomy = settings.model_copy(update={"out": tmp_path / "roomy", "url": tiny_server.url})
    assert live.answers() == record(Policy.parse("sglang"), roomy).answers()


def test_requests_that_are_taken_back_for_want_of_memory_answer_the_same(
    pressed_server: TinyServer, tiny_server: TinyServer
) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(16, 300) for _ in range(620)] for _ in range(4)]  # 5 pages each, 7 with their answers
    counters = ("sglang:num_retracted_requests", "sglang:evicted_tokens")
    before = [pressed_server.total(name) for name in counters]
    tiny_server.flush()
    alone = _answers(tiny_server, prompts)
    short = _answers(pressed_server, prompts)
    retracted, evicted = (pressed_server.total(name) for name in counters)
    assert retracted > before[0]
    assert evicted > before[1]
    assert short == alone
    released = [e for e in read_journal(journal_of(pressed_server.folder / "run")) if e.kind == "release"]
    assert len(released) == retracted


def _answers(server: TinyServer, prompts: list[list[int]]) -> list[list[int]]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: server.generate(ids, 200)["output_ids"], prompts))
