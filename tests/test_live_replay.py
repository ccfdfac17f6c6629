"""What a replay tells a server that has our policies, and that it tells other servers nothing of it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agentserve.runtime import torchvision_operators
from agentserve.runtime.policy_settings import BACKEND
from tests.replay_server import InThread, ReplayServer
from tests.replay_trace import write_trace
from traces.replay.clients.base import POLICY_BACKEND, STOP_PARAMETER, conversation_name
from traces.replay.config import ReplayConfig
from traces.replay.rebuild import sent_requests
from traces.replay.run import ReplayError, replay, replayed_sessions
from traces.replay.store import Run, read_run


def go(tmp_path: Path, server: ReplayServer, **settings: object) -> Run:
    trace = write_trace(tmp_path / "trace", sessions=2, turns=4)
    vocab = {} if settings.get("client") == "openai" else {"vocab": (100, 400)}
    with InThread(server) as url:
        chosen = {"trace": str(trace), "out": tmp_path / "run", "url": url, "think": "none"} | vocab | settings
        result = replay(ReplayConfig.model_validate(chosen))
    assert (result.status, result.tally.failed) == ("finished", 0)
    return read_run(tmp_path / "run")


@pytest.mark.parametrize("client", ["sglang", "openai"])
def test_conversations_stop_reasons_and_ends_are_told_to_our_policies(tmp_path: Path, client: str) -> None:
    server = ReplayServer(policies=True)
    run = go(tmp_path, server, client=client, concurrency=1)
    assert run.header.server.names_sessions
    names = {body["session_id"] for body in server.seen}
    assert names == {f"{s}/{flow}" for s in ("s0", "s1") for flow in ("main", f"{s}-agent")}
    stops = [body.get("sampling_params", body)["custom_params"] for body in server.seen]
    assert [stop[STOP_PARAMETER] for stop in stops].count("end_turn") == 4  # the last of each flow
    assert {stop[STOP_PARAMETER] for stop in stops} == {"tool_use", "end_turn"}
    assert server.closed == ["s0/s0-agent", "s0", "s1/s1-agent", "s1"]
    told = [(e.session, e.flow) for e in run.events if e.kind == "ended"]
    assert told == [("s0", "s0-agent"), ("s0", None), ("s1", "s1-agent"), ("s1", None)]


@pytest.mark.parametrize("client", ["sglang", "openai"])
def test_another_server_is_told_nothing(tmp_path: Path, client: str) -> None:
    server = ReplayServer()
    run = go(tmp_path, server, client=client)
    assert not run.header.server.names_sessions
    for body in server.seen:
        assert not {"session_id", "custom_params"} & (body.keys() | body.get("sampling_params", {}).keys())
    assert server.closed == []
    assert {event.kind for event in run.events} == {"started", "finished"}


def test_an_end_that_is_refused_is_an_event_and_the_run_goes_on(tmp_path: Path) -> None:
    server = ReplayServer(policies=True, refuses_ends=True)
    run = go(tmp_path, server)
    failed = [event for event in run.events if event.kind == "end_failed"]
    assert len(failed) == 4
    assert all(event.message.startswith("400: ") for event in failed)


def test_both_sides_mean_the_same_names() -> None:
    torchvision_operators.declare()
    from agentserve.runtime import sglang_radix_cache

    assert (POLICY_BACKEND, STOP_PARAMETER) == (BACKEND, sglang_radix_cache.STOP_PARAMETER)


def test_a_slash_in_a_session_id_does_not_part_it() -> None:
    assert conversation_name("team/a", "main") == "team%2Fa/main"
    assert conversation_name("team/a").partition("/")[0] == "team%2Fa"


def test_in_flight_1_sends_one_request_after_the_other(tmp_path: Path) -> None:
    server = ReplayServer(token_s=0.002)
    run = go(tmp_path, server, concurrency=2, in_flight=1)
    records = sorted(run.records(), key=lambda r: r.sent_s)
    assert all(before.done_s <= after.sent_s for before, after in pairwise(records))
    assert len({r.session for r in records[:4]}) == 2, "both sessions are active"


@pytest.mark.parametrize("history", ["recorded", "own"])
def test_what_a_run_sent_is_rebuilt_token_by_token(tmp_path: Path, history: str) -> None:
    server = ReplayServer()
    run = go(tmp_path, server, history=history, concurrency=2)
    sent = sent_requests(run.header, replayed_sessions(run), run.records(), run.outputs())
    # Requests of two sessions may overtake each other between client and server.
    assert sorted(s.prompt.tolist() for s in sent) == sorted(body["input_ids"] for body in server.seen)
    assert all(len(s.output) == s.record.output_tokens for s in sent)
    assert sum(np.count_nonzero(s.output) for s in sent) > 0


def test_a_changed_trace_is_not_taken_for_the_run(tmp_path: Path) -> None:
    run = go(tmp_path, ReplayServer())
    write_trace(tmp_path / "trace", sessions=2, turns=5)
    with pytest.raises(ReplayError, match="the trace has changed"):
        replayed_sessions(run)


def test_a_run_of_text_has_no_tokens(tmp_path: Path) -> None:
    run = go(tmp_path, ReplayServer(), client="openai")
    with pytest.raises(ValueError, match="sent as text"):
        sent_requests(run.header, replayed_sessions(run), run.records(), run.outputs())
