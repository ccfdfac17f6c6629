"""Replays against OpenAI-compatible servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replay_runs import PER_SESSION, go, invoke
from tests.replay_server import InThread, ReplayServer
from tests.replay_trace import write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace")


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
