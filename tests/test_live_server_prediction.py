"""The simulator on the events of a real server: gittins on the tiny M3, with less memory than its sessions want."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.bench.prediction import predictions
from eval.bench.prediction_live import Policy, live_run
from traces.replay.config import ReplayConfig

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

KV_TOKENS = 8192


def test_the_simulator_predicts_a_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    settings = ReplayConfig(
        trace="generated:preset=tiny,sessions=10,seed=5", out=tmp_path / "run", concurrency=10, think="none",
        max_output=8, max_turns=8, in_flight=1,
    )  # fmt: skip
    live = live_run(Policy.parse("gittins"), settings, capacity=KV_TOKENS, checkpoint=tiny_checkpoint)
    assert live.run.header.server.names_sessions
    assert len([event for event in live.run.events if event.kind == "ended" and event.flow is None]) == 10
    assert live.journal is not None
    said = predictions(live)["server"]
    assert said.live_evicted == sum(event.tokens for event in live.journal if event.kind == "evict")
    assert said.live_evicted > KV_TOKENS
    assert abs(said.points_off) <= 0.3, said.differences
    assert said.same >= 0.95, said.differences
    assert 0.2 < said.live_rate < live.theoretical
