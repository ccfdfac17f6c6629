"""The closed loop over real HTTP, against a stand-in server that can be told to misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from radix_cache.rates import hit_tokens
from tests.replay_runs import PER_SESSION, VOCAB, go, keys, with_output
from tests.replay_server import Faults, InThread, ReplayServer, answer
from tests.replay_trace import write_trace
from traces.replay.clients.base import Call
from traces.replay.clients.sglang import SGLangClient, usable_context
from traces.replay.config import ReplayConfig
from traces.replay.run import replay
from traces.replay.store import read_run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace")


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("sharing", ["session", "tools+system"])
@pytest.mark.parametrize("history", ["recorded", "own"])
def test_realized_is_theoretical_for_an_infinite_cache(
    trace: Path, tmp_path: Path, history: str, sharing: str, incremental: bool
) -> None:
    server = ReplayServer(incremental=incremental)
    result, records = go(trace, tmp_path / "run", server, history=history, sharing=sharing)
    assert (result.status, result.tally.failed, len(records)) == ("finished", 0, 4 * PER_SESSION)
    assert len(set(keys(records))) == len(records)
    for r in records:
        assert r.prompt_tokens == r.prompt_tokens_reported
        assert r.output_tokens == r.output_tokens_wanted >= 1
        assert r.cached_tokens == hit_tokens(r.shared_output_lcp, r.prompt_tokens, 128)
        assert r.ready_s <= r.sent_s <= (r.first_token_s or 0) <= r.done_s
        assert r.shared_output_lcp >= r.ready_lcp
        assert r.shared_output_lcp >= r.session_output_lcp >= r.session_lcp
    assert result.tally.realized.rate == result.tally.theoretical.rate > 0.3
    assert server.flushes == 1
    assert [event.kind for event in read_run(tmp_path / "run").events] == ["started", "finished"]
    if sharing == "tools+system":
        assert any(r.shared_lcp > r.session_lcp for r in records)


def test_what_is_sent_is_seeded_and_of_the_recorded_length(trace: Path, tmp_path: Path) -> None:
    seen = []
    for seed in (1, 1, 2):
        server = ReplayServer()
        go(trace, tmp_path / f"run{len(seen)}", server, seed=seed, concurrency=1)
        seen.append([body["input_ids"] for body in server.seen])
    assert seen[0] == seen[1] != seen[2]
    assert [len(ids) for ids in seen[0]] == [len(ids) for ids in seen[2]]
    assert all(VOCAB[0] <= min(ids) and max(ids) < VOCAB[1] for ids in seen[0])
    recorded = json.loads((trace / "s0.json").read_text())["requests"]
    lengths = [r["in"] for r in recorded if r["type"] == "s"] + [r["in"] for r in recorded[2]["requests"]]
    assert sorted(len(ids) for ids in seen[0][:PER_SESSION]) == sorted(lengths)


@pytest.mark.parametrize("config", [{"vocab_size": 320}, {"text_config": {"vocab_size": 320}}])
def test_token_ids_come_from_the_middle_of_the_checkpoints_vocabulary(
    trace: Path, tmp_path: Path, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = ReplayServer(model_path=str(tmp_path))
    go(trace, tmp_path / "run", server, vocab=None, limit_requests=4)
    sent = {token for body in server.seen for token in body["input_ids"]}
    assert (min(sent), max(sent)) == (40, 239)
    assert read_run(tmp_path / "run").header.vocab == (40, 240)


def test_own_history_sends_the_servers_words_back(trace: Path, tmp_path: Path) -> None:
    hits = {}
    for history in ("recorded", "own"):
        server = ReplayServer(page_size=1)
        _, records = go(trace, tmp_path / history, server, history=history)
        hits[history] = sum(r.session_output_lcp - r.session_lcp for r in records)
        assert all(r.cached_tokens == hit_tokens(r.shared_output_lcp, r.prompt_tokens, 1) for r in records)
    assert hits["own"] > hits["recorded"] + 200


def test_concurrency_bounds_the_sessions_and_a_new_one_starts_when_one_ends(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", sessions=6, turns=3)
    running: list[int] = []
    with InThread(ReplayServer(token_s=0.002)) as url:
        config = ReplayConfig(
            trace=str(trace), out=tmp_path / "run", url=url, think="none", vocab=VOCAB, concurrency=2, max_output=5
        )
        result = replay(config, on_progress=lambda tally: running.append(tally.sessions_running))
    assert result.tally.sessions_done == 6
    assert max(running) == 2
    firsts = {r.session: r.sent_s for r in sorted(read_run(tmp_path / "run").records(), key=lambda r: -r.sent_s)}
    assert sorted(firsts, key=lambda s: firsts[s]) == sorted(firsts)  # trace order


def test_turns_wait_for_their_predecessor_think_time_spawn_and_join(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace", sessions=1, think=30.0)
    _, records = go(trace, tmp_path / "run", ReplayServer(token_s=0.001), think="capped:0.05")
    main = sorted((r for r in records if r.flow == "main"), key=lambda r: r.turn)
    child = sorted((r for r in records if r.flow != "main"), key=lambda r: r.turn)
    for flow in (main, child):
        for before, after in itertools.pairwise(flow):
            assert after.think_s == 0.05
            assert after.sent_s >= after.ready_s >= before.done_s + 0.05
            assert after.sent_s - after.ready_s < 10  # not the recorded 30 s
    # The trace's subagent starts after turn 1 and has ended before turn 2.
    assert child[0].ready_s >= main[1].done_s
    assert main[2].ready_s >= child[-1].done_s


def test_zero_recorded_output_is_sent_as_one_token(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer()
    go(trace, tmp_path / "run", server)
    recorded = [r for n in range(4) for r in json.loads((trace / f"s{n}.json").read_text())["requests"]]
    assert any(r.get("out") == 0 for r in recorded)
    assert min(body["sampling_params"]["max_new_tokens"] for body in server.seen) == 1


@pytest.mark.parametrize(
    ("faults", "kind", "message"),
    [
        (Faults(miscount_at=[3]), "length_mismatch", "tokens, "),
        (Faults(short_at=[3]), "short_output", "of 9 tokens"),
        (Faults(refuse_at=[3]), "http", "500: .*out of luck"),
        (Faults(drop_at=[3]), "connection", "RemoteProtocolError"),
        (Faults(stall_at=[3]), "timeout", "ReadTimeout"),
    ],
)
def test_a_faulty_answer_is_recorded_and_the_run_goes_on(
    tmp_path: Path, faults: Faults, kind: str, message: str
) -> None:
    trace = with_output(write_trace(tmp_path / "trace", sessions=2), 9)
    result, records = go(trace, tmp_path / "run", ReplayServer(faults=faults), concurrency=1, request_timeout_s=0.7)
    failed = [r for r in records if r.error is not None]
    assert (result.status, len(records), len(failed)) == ("finished", 2 * PER_SESSION, 1)
    assert result.tally.errors == {kind: 1}
    assert failed[0].error is not None
    assert failed[0].error.kind == kind
    assert re.search(message, failed[0].error.message)


def test_context_limit_drops_turns_before_sending_and_says_so(trace: Path, tmp_path: Path) -> None:
    result, records = go(trace, tmp_path / "run", ReplayServer(context_length=900))
    run = read_run(tmp_path / "run")
    dropped = [event for event in run.events if event.kind == "dropped"]
    assert result.dropped_turns == len(dropped) > 0
    assert len(records) + len(dropped) == 4 * PER_SESSION
    assert run.header.filter["max_context"] == 893
    assert run.header.trace_format == "weka"
    assert all(r.prompt_tokens + r.output_tokens_wanted <= 894 for r in records)
    gone = {(event.session, event.flow, event.turn) for event in dropped}
    assert not gone & set(keys(records))


def test_usable_context_is_below_what_the_server_clips() -> None:
    async def info(server: ReplayServer) -> int | None:
        with InThread(server) as url:
            client = SGLangClient(url)
            try:
                return usable_context(await client.info())
            finally:
                await client.aclose()

    assert asyncio.run(info(ReplayServer(context_length=1000))) == 993
    assert asyncio.run(info(ReplayServer(context_length=1000, capacity=640, page_size=64))) == 640 - 128 - 7


def test_sampling_and_secrets(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer()
    go(trace, tmp_path / "run", server, limit_requests=3)
    assert len(server.seen) == 3
    assert server.seen[0]["sampling_params"] | {"max_new_tokens": 0} == {
        "max_new_tokens": 0, "ignore_eos": True, "temperature": 0.0,
    }  # fmt: skip
    assert "do-not-store-me" not in (tmp_path / "run" / "run.json").read_text()


def test_stand_in_streams_what_it_says() -> None:
    """The stand-in itself: cumulative ids, then the prefix it must serve."""

    async def twice(url: str) -> list[object]:
        client = SGLangClient(url)
        prompt = np.arange(300, dtype=np.int32)
        try:
            outcomes = [await client.generate(Call(prompt, 5), lambda: None) for _ in range(2)]
        finally:
            await client.aclose()
        assert all(np.array_equal(o.output_ids, answer(prompt, 5)) for o in outcomes if o.output_ids is not None)
        return [(o.cached_tokens, o.cached_device, o.finish_reason, o.error) for o in outcomes]

    with InThread(ReplayServer()) as url:
        assert asyncio.run(twice(url)) == [(0, None, "length", None), (256, 256, "length", None)]
