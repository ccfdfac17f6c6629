"""``agentserve replay`` on a command line: what it prints, and what it says to bad input."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.replay_runs import invoke
from tests.replay_server import Faults, InThread, ReplayServer
from tests.replay_trace import write_trace
from traces.replay.clients.base import ServerUnreachableError
from traces.replay.clients.sglang import SGLangClient
from traces.replay.store import read_run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace")


def test_command_reports_and_names_the_next_step(trace: Path, tmp_path: Path) -> None:
    with InThread(ReplayServer()) as url:
        code, output = invoke(trace, "--out", tmp_path / "run", "--url", url, "--think", "none", "--vocab", "100:400")
    assert code == 0, output
    assert f"Next: agentserve report {tmp_path / 'run'}" in output
    assert "no errors" in output
    result = list(read_run(tmp_path / "run").records())
    realized = sum(r.cached_tokens or 0 for r in result) / sum(r.prompt_tokens for r in result)
    assert f"realized {realized:.2%}, theoretical at page size 128 {realized:.2%}" in output


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


def test_no_sglang_server_at_the_address() -> None:
    async def ask(url: str) -> None:
        client = SGLangClient(url + "/nothing")
        try:
            await client.info()
        finally:
            await client.aclose()

    with InThread(ReplayServer()) as url, pytest.raises(ServerUnreachableError, match="--client openai"):
        asyncio.run(ask(url))
