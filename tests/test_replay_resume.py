"""A replay that ends before its time: the server goes away, Ctrl-C, kill; and going on with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from agentserve.cli.replay import command
from tests.replay_runs import PER_SESSION, VOCAB, facts, invoke, keys, with_output
from tests.replay_server import Faults, InThread, ReplayServer
from tests.replay_trace import write_trace
from traces.replay.config import ReplayConfig
from traces.replay.run import ReplayError, replay, resumed_config
from traces.replay.store import read_run
from traces.replay.tally import Tally


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace")


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
    with_output(trace, 20)
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
    with_output(trace, 20)
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


def test_resuming_a_finished_run_sends_nothing(trace: Path, tmp_path: Path) -> None:
    server = ReplayServer()
    with InThread(server) as url:
        replay(ReplayConfig(trace=str(trace), out=tmp_path / "run", url=url, think="none", vocab=VOCAB))
        sent = len(server.seen)
        result = replay(resumed_config(tmp_path / "run"), resume=True)
    assert (result.status, len(server.seen)) == ("finished", sent)


def test_resume_refuses_another_trace_another_limit_and_other_settings(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    server = ReplayServer()
    with InThread(server) as url:
        replay(ReplayConfig(trace=str(trace), out=out, url=url, think="none", vocab=VOCAB, limit_requests=4))
        code, output = invoke("--resume", out, "--seed", "3")
        assert code == 2
        assert "leave out --seed" in output
        before = (out / "requests.jsonl").read_bytes()
        server.context_length = 500
        with pytest.raises(ReplayError, match="this server takes 493"):
            replay(resumed_config(out), resume=True)
        server.context_length = 1 << 20
        write_trace(trace, seed=5)
        with pytest.raises(ReplayError, match="the trace has changed"):
            replay(resumed_config(out), resume=True)
    assert (out / "requests.jsonl").read_bytes() == before
