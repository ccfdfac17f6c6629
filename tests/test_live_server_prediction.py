"""A real server that is short of memory, gittins on the tiny M3: what the simulator says of its steps, and what
becomes of requests that it takes back."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from agentserve.launch.tiny import tiny_server as started
from agentserve.runtime.policy_journal import JOURNAL_VARIABLE, read_journal
from eval.bench.prediction import predictions
from eval.bench.prediction_live import Policy, journal_of, record
from tests.conftest import TinyServer
from traces.replay.config import ReplayConfig

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

KV_TOKENS = 3072  # 24 pages


class Pressed(NamedTuple):
    url: str
    run: Path  # where a replay against it is to be recorded


@pytest.fixture(scope="module")
def pressed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressed]:
    """A server that takes in more than it has memory for: it reckons with one token of each answer."""
    run = tmp_path_factory.mktemp("pressed") / "run"
    overrides = {
        "kv.capacity_tokens": KV_TOKENS,
        "prefill_chunk": 512,
        "radix.policy": "gittins",
        "extra_args": ["--schedule-conservativeness=0.0"],
        "env": {JOURNAL_VARIABLE: str(journal_of(run)), "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"},
    }
    with started(overrides, checkpoint=tiny_checkpoint, log=run.parent / "server.log") as server:
        yield Pressed(server.plan.url, run)


def test_the_simulator_predicts_a_server_with_several_requests_in_flight(pressed: Pressed) -> None:
    settings = ReplayConfig(
        trace="generated:preset=tiny,sessions=8,seed=5", out=pressed.run, url=pressed.url, concurrency=8, in_flight=3,
        think="none", max_output=8, max_turns=4, max_context=1300,
    )  # fmt: skip
    live = record(Policy.parse("gittins"), settings)
    assert live.run.header.server.names_sessions
    assert len([event for event in live.run.events if event.kind == "ended" and event.flow is None]) == 8
    said = predictions(live)["server_steps"]
    assert said.overlapping > 0.5 * said.requests
    assert said.live_evicted == said.predicted_evicted > KV_TOKENS
    assert abs(said.points_off) <= 0.3, said.differences
    assert said.same >= 0.95, said.differences
    assert 0.05 < said.live_rate < live.theoretical


def test_requests_that_are_taken_back_for_want_of_memory_answer_the_same(
    pressed: Pressed, tiny_server: TinyServer
) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(16, 300) for _ in range(620)] for _ in range(4)]  # 5 pages each, 7 with their answers
    before = _totals(pressed.url)
    tiny_server.flush()
    alone = _answers(tiny_server.url, prompts)
    short = _answers(pressed.url, prompts)
    after = _totals(pressed.url)
    assert after["num_retracted_requests"] > before["num_retracted_requests"]
    assert after["evicted_tokens"] > before["evicted_tokens"]
    assert short == alone
    released = [event for event in read_journal(journal_of(pressed.run)) if event.kind == "release"]
    assert len(released) == after["num_retracted_requests"]


def _answers(url: str, prompts: list[list[int]]) -> list[list[int]]:
    def generate(ids: list[int]) -> list[int]:
        sampling: dict[str, Any] = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        made = httpx.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=600)
        made.raise_for_status()
        answer: list[int] = made.json()["output_ids"]
        return answer

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(generate, prompts))


def _totals(url: str) -> dict[str, float]:
    """SGLang's own counters."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        name: sum(
            float(v) for v in re.findall(rf"^sglang:{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        )
        for name in ("num_retracted_requests", "evicted_tokens")
    }
