"""The closed loop over real HTTP, against a stand-in server that can be told to misbehave."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from agentserve.cli.replay import command
from radix_cache.rates import hit_tokens
from tests.replay_server import Faults, InThread, ReplayServer, answer
from tests.replay_trace import write_trace
from traces.replay.clients.base import Call, ServerUnreachableError
from traces.replay.clients.sglang import SGLangClient, usable_context
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import ReplayError, RunResult, replay, resumed_config
from traces.replay.store import Run, read_run
from traces.replay.tally import Tally

PER_SESSION = 8  # requests of one session of `write_trace(turns=6)`
VOCAB = (100, 400)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace")


def go(trace: Path, out: Path, server: ReplayServer, **settings: object) -> tuple[RunResult, list[RequestRecord]]:
    with InThread(server) as url:
        config = ReplayConfig(trace=str(trace), out=out, url=url, **{"think": "none", "vocab": VOCAB} | settings)
        result = replay(config)
    return result, list(read_run(out).records())


def keys(records: list[RequestRecord]) -> list[tuple[str, str, int]]:
    return [(r.session, r.flow, r.turn) for r in records]


def facts(records: list[RequestRecord]) -> dict[tuple[str, str, int], tuple[object, ...]]:
    """What must not depend on time, by turn."""
    return {
        (r.session, r.flow, r.turn): (
            r.prompt_tokens, r.output_sha256, r.session_lcp, r.session_output_lcp, r.shared_lcp, r.shared_output_lcp,
        )
        for r in records
    }  # fmt: skip


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
    trace = _with_output(write_trace(tmp_path / "trace", sessions=2), 9)
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


# --- the server goes away ------------------------------------------------------------------------------------


@contextmanager
def own_process(*, faults: dict[str, object] | None = None, token_s: float = 0.0, port: int = 0) -> Iterator[str]:
    if port == 0:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    arguments = [str(port), "--faults", json.dumps(faults or {}), "--token-s", str(token_s)]
    root = Path(__file__).parent.parent
    process = subprocess.Popen([sys.executable, "-m", "tests.replay_server", *arguments], cwd=root)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/model_info", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _with_output(trace: Path, tokens: int) -> Path:
    for file in trace.iterdir():
        content = json.loads(file.read_text())
        for request in content["requests"]:
            for each in request.get("requests", [request]):
                each["out"] = tokens
        file.write_text(json.dumps(content))
    return trace


@pytest.mark.parametrize(("concurrency", "history"), [(1, "recorded"), (3, "own")])
def test_server_dying_keeps_the_run_and_resume_completes_it(
    trace: Path, tmp_path: Path, concurrency: int, history: str
) -> None:
    def config(out: str, url: str) -> ReplayConfig:
        return ReplayConfig(
            trace=str(trace), out=tmp_path / out, url=url, think="none", vocab=VOCAB, sharing="tools+system",
            concurrency=concurrency, history=history,
        )  # fmt: skip

    with own_process(faults={"die_at": 11}) as url:
        lost = replay(config("run", url))
    assert lost.status == "server_lost"
    run = read_run(tmp_path / "run")
    assert [event.kind for event in run.events] == ["started", "server_lost"]
    before = list(run.records())
    failed = [r for r in before if r.error is not None]
    assert {r.error.kind for r in failed if r.error} == {"connection"}
    assert 1 <= len(failed) <= 2 * concurrency  # a session has up to two requests in flight
    assert len(before) - len(failed) >= 11 - 2 * concurrency

    with own_process() as url:
        ended = replay(resumed_config(tmp_path / "run", url=url), resume=True)
        uninterrupted = replay(config("whole", url))
    assert (ended.status, ended.tally.requests, ended.tally.failed) == ("finished", 4 * PER_SESSION, 0)
    after = list(read_run(tmp_path / "run").records())
    whole = list(read_run(tmp_path / "whole").records())
    assert uninterrupted.status == "finished"
    assert sorted(keys(after)) == sorted(keys(whole))
    assert after[: len(before) - len(failed)] == [r for r in before if r.error is None]
    if concurrency == 1 and history == "recorded":
        kept = len(before) - len(failed)
        theirs = facts(whole)
        # The subagent runs beside its parent, so who comes first may differ; what is sent and answered may not.
        assert {k: v[:2] for k, v in facts(after).items()} == {k: v[:2] for k, v in theirs.items()}
        assert kept > 0
    resumed = next(event for event in read_run(tmp_path / "run").events if event.kind == "resumed")
    assert f"{len(failed)} requests that lost their server are sent again" in resumed.message
    assert "another process" in resumed.message
    assert min(r.sent_s for r in after[len(before) - len(failed) :]) >= max(r.done_s for r in before if not r.error)


@pytest.mark.parametrize("history", ["recorded", "own"])
def test_resumed_prefix_lengths_are_those_of_an_uninterrupted_run(tmp_path: Path, history: str) -> None:
    """Without subagents and one session at a time the order of requests is fixed, so everything must agree."""
    trace = _without_subagents(write_trace(tmp_path / "trace"))
    settings = {"concurrency": 1, "think": "none", "vocab": VOCAB, "history": history, "sharing": "tools+system"}
    with InThread(ReplayServer()) as url:
        replay(ReplayConfig(trace=str(trace), out=tmp_path / "whole", url=url, **settings))  # type: ignore[arg-type]
        with own_process(faults={"die_at": 10}) as dying:
            replay(ReplayConfig(trace=str(trace), out=tmp_path / "run", url=dying, **settings))  # type: ignore[arg-type]
        replay(resumed_config(tmp_path / "run", url=url), resume=True)
    whole, after = (list(read_run(tmp_path / name).records()) for name in ("whole", "run"))
    assert facts(after) == facts(whole)
    assert len(after) == 4 * 6


def _without_subagents(trace: Path) -> Path:
    for file in trace.iterdir():
        content = json.loads(file.read_text())
        content["requests"] = [request for request in content["requests"] if request["type"] != "subagent"]
        file.write_text(json.dumps(content))
    return trace


def test_a_stalled_server_that_stops_answering_is_lost(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer(faults=Faults(stall_at=[2], unhealthy=True))
    with InThread(server) as url:
        config = ReplayConfig(
            trace=str(trace), out=tmp_path / "run", url=url, think="none", vocab=VOCAB, concurrency=1,
            request_timeout_s=0.5,
        )  # fmt: skip
        server.faults.unhealthy = False

        def sicken(tally: Tally) -> None:
            server.faults.unhealthy = tally.requests >= 1

        result = replay(config, on_progress=sicken)
    assert result.status == "server_lost"
    kinds = [r.error.kind if r.error else None for r in read_run(tmp_path / "run").records()]
    assert kinds == [None, "timeout"]


# --- Ctrl-C, kill, and the command line ----------------------------------------------------------------------


def start(trace: Path, out: Path, url: str, *more: str) -> subprocess.Popen[str]:
    arguments = [str(trace), "--out", str(out), "--url", url, "--think", "none", "--vocab", "100:400", *more]
    program = "from agentserve.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, "replay", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent,
    )  # fmt: skip


def recorded_lines(out: Path) -> int:
    file = out / "requests.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def test_ctrl_c_ends_cleanly_and_the_printed_command_resumes(trace: Path, tmp_path: Path) -> None:
    _with_output(trace, 20)
    server = ReplayServer(token_s=0.01)
    with InThread(server) as url:
        process = start(trace, tmp_path / "run", url)
        wait_for(lambda: recorded_lines(tmp_path / "run") >= 6)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert process.returncode == 130, err
        assert f"agentserve replay --resume {tmp_path / 'run'}" in out
        run = read_run(tmp_path / "run")
        records = list(run.records())
        assert run.truncated_lines == 0
        assert all(r.error is None for r in records)
        interrupted = run.events[-1]
        assert interrupted.kind == "interrupted"
        assert interrupted.requests is not None
        assert 1 <= interrupted.requests <= 8
        assert f"{interrupted.requests} requests in flight" in out
        wait_for(lambda: server.aborted >= 1)  # the server noticed, too
        sent_before = len(server.seen)
        server.token_s = 0.0
        resumed = CliRunner().invoke(command, ["--resume", str(tmp_path / "run"), "--quiet"], catch_exceptions=False)
    assert resumed.exit_code == 0, resumed.output
    assert f"{4 * PER_SESSION} of {4 * PER_SESSION} requests" in resumed.output
    assert server.flushes == 1
    after = list(read_run(tmp_path / "run").records())
    assert len(set(keys(after))) == len(after) == 4 * PER_SESSION
    assert len(server.seen) - sent_before == 4 * PER_SESSION - len(records)


def test_second_ctrl_c_exits_at_once() -> None:
    """A run that does not react to the first signal (here: one that ignores it) is left by the second."""
    program = """
import asyncio
from traces.replay.signals import Signals

async def main():
    with Signals(lambda: print("first", flush=True), enabled=True):
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "first\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 130
    process.stdout.close()


def test_killed_replay_is_resumed_to_the_same_records(trace: Path, tmp_path: Path) -> None:
    _with_output(trace, 20)
    server = ReplayServer(token_s=0.005)
    with InThread(server) as url:
        process = start(trace, tmp_path / "run", url)
        wait_for(lambda: recorded_lines(tmp_path / "run") >= 5)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        file = tmp_path / "run" / "requests.jsonl"
        file.write_bytes(file.read_bytes() + b'{"session":"s0","flow":"ma')  # what a kill in a write leaves
        assert read_run(tmp_path / "run").header.requests == 4 * PER_SESSION
        server.token_s = 0.0
        resumed = replay(resumed_config(tmp_path / "run"), resume=True)
        whole = replay(ReplayConfig(trace=str(trace), out=tmp_path / "whole", url=url, think="none", vocab=VOCAB))
    assert resumed.status == whole.status == "finished"
    after, reference = (list(read_run(tmp_path / name).records()) for name in ("run", "whole"))
    assert sorted(keys(after)) == sorted(keys(reference))
    assert {k: v[:2] for k, v in facts(after).items()} == {k: v[:2] for k, v in facts(reference).items()}
    assert "half-written" in next(e for e in read_run(tmp_path / "run").events if e.kind == "resumed").message


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_command_reports_and_names_the_next_step(trace: Path, tmp_path: Path) -> None:
    with InThread(ReplayServer()) as url:
        code, output = invoke(trace, "--out", tmp_path / "run", "--url", url, "--think", "none", "--vocab", "100:400")
    assert code == 0, output
    assert f"Next: agentserve report {tmp_path / 'run'}" in output
    assert "no errors" in output
    result = list(read_run(tmp_path / "run").records())
    realized = sum(r.cached_tokens or 0 for r in result) / sum(r.prompt_tokens for r in result)
    assert f"realized {realized:.2%}, theoretical at page size 128 {realized:.2%}" in output


def test_resuming_a_finished_run_sends_nothing(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer()
    with InThread(server) as url:
        replay(ReplayConfig(trace=str(trace), out=tmp_path / "run", url=url, think="none", vocab=VOCAB))
        sent = len(server.seen)
        result = replay(resumed_config(tmp_path / "run"), resume=True)
    assert (result.status, len(server.seen)) == ("finished", sent)


def test_bad_inputs_say_what_to_do(trace: Path, tmp_path: Path) -> None:
    unused = "http://127.0.0.1:9"
    base = ("--think", "none", "--vocab", "100:400")
    code, output = invoke(trace, "--out", tmp_path / "a", "--url", unused, *base)
    assert code == 1
    assert "agentserve launch" in output
    assert not (tmp_path / "a").exists()
    assert invoke() == (2, invoke()[1])
    assert "--out RUN" in invoke()[1]
    code, output = invoke(trace, "--out", tmp_path / "a", "--think", "slow")
    assert code == 2
    assert "capped:SECONDS" in output
    code, output = invoke(trace, "--out", tmp_path / "a", "--vocab", "7")
    assert code == 2
    assert "LO:HI" in output
    code, output = invoke("--resume", tmp_path / "nothing")
    assert code == 1
    assert "nothing to resume" in output
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with InThread(ReplayServer(context_length=20)) as url:
        code, output = invoke(trace, "--out", tmp_path / "full", "--url", url, *base)
        assert code == 1
        assert "not empty" in output
        code, output = invoke(trace, "--out", tmp_path / "a", "--url", url, *base)
        assert code == 1
        assert "all 4 sessions" in output
        assert "--tokens-per-block" in output
        code, output = invoke(tmp_path / "missing", "--out", tmp_path / "a", "--url", url, *base)
        assert code == 1
        assert "missing" in output
        code, output = invoke(trace, "--out", tmp_path / "a", "--url", url)
        assert code == 1
        assert "--vocab 1000:100000" in output
    assert not (tmp_path / "a").exists()
    with InThread(ReplayServer(faults=Faults(busy=True))) as url:
        code, output = invoke(trace, "--out", tmp_path / "a", "--url", url, *base)
        assert code == 1
        assert "--no-flush-cache" in output
    assert not (tmp_path / "a").exists()


def test_resume_refuses_another_trace_another_limit_and_other_settings(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    server = ReplayServer()
    with InThread(server) as url:
        replay(ReplayConfig(trace=str(trace), out=out, url=url, think="none", vocab=VOCAB, limit_requests=4))
        code, output = invoke("--resume", out, "--seed", "3")
        assert code == 2
        assert "leave out seed" in output
        before = (out / "requests.jsonl").read_bytes()
        server.context_length = 500
        with pytest.raises(ReplayError, match="this server takes 493"):
            replay(resumed_config(out), resume=True)
        server.context_length = 1 << 20
        write_trace(trace, seed=5)
        with pytest.raises(ReplayError, match="the trace has changed"):
            replay(resumed_config(out), resume=True)
    assert (out / "requests.jsonl").read_bytes() == before


def test_no_sglang_server_at_the_address() -> None:
    async def ask(url: str) -> None:
        client = SGLangClient(url + "/nothing")
        try:
            await client.info()
        finally:
            await client.aclose()

    with InThread(ReplayServer()) as url, pytest.raises(ServerUnreachableError, match="--client openai"):
        asyncio.run(ask(url))


# --- OpenAI-compatible servers -------------------------------------------------------------------------------


def chat(run: Path) -> tuple[Run, list[RequestRecord]]:
    loaded = read_run(run)
    return loaded, list(loaded.records())


@pytest.mark.parametrize("history", ["recorded", "own"])
def test_chat_completions(trace: Path, tmp_path: Path, history: str) -> None:
    server = ReplayServer(page_size=1)
    result, records = go(trace, tmp_path / "run", server, client="openai", history=history, vocab=None)
    assert (result.status, result.tally.failed, len(records)) == ("finished", 0, 4 * PER_SESSION)
    for r in records:
        assert r.output_tokens == r.output_tokens_wanted
        # Role markers are all that the stand-in's template adds to a word a token.
        assert r.prompt_tokens_reported is not None
        if history == "recorded":
            assert r.prompt_tokens < r.prompt_tokens_reported <= r.prompt_tokens + 2 * 8
            assert (r.cached_tokens or 0) >= min(r.session_lcp, r.prompt_tokens - 1)
    assert server.seen[0]["model"] == "tiny"
    assert server.seen[0]["messages"][0]["role"] == "system"
    own_words = any(m["role"] == "assistant" and m["content"].startswith(" a") for m in _messages(server))
    assert own_words is (history == "own")
    assert server.flushes == 0


def _messages(server: ReplayServer) -> list[dict[str, str]]:
    return [message for body in server.seen for message in body["messages"]]


def test_chat_without_cache_report_gives_records_without_it(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer(reports_cache=False)
    result, records = go(trace, tmp_path / "run", server, client="openai", limit_requests=5, vocab=None)
    assert [r.cached_tokens for r in records] == [None] * 5
    assert result.tally.realized.requests == 0


def test_chat_refuses_to_flush_and_unknown_models(trace: Path, tmp_path: Path) -> None:
    with InThread(ReplayServer()) as url:
        base = (trace, "--out", tmp_path / "run", "--url", url, "--client", "openai")
        code, output = invoke(*base, "--model", "other")
        assert code == 1
        assert "--model can be tiny" in output
        code, output = invoke(*base, "--flush-cache")
        assert code == 1
        assert "--flush-cache" in output


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
