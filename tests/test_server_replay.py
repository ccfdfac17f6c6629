"""Replays against the tiny M3 on real SGLang: lengths, hit rates and failures as a user meets them."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from agentserve.cli.report import command as report_command
from eval.report import load_run, summarize
from radix_cache.rates import hit_tokens
from tests.servers import TinyServer
from traces.replay import read_run
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import replay, resumed_config

pytestmark = pytest.mark.server

GENERATED = "generated:preset=tiny,sessions=4,seed=5"


def run_replay(server: TinyServer, out: Path, **settings: object) -> list[RequestRecord]:
    result = replay(ReplayConfig(out=out, url=server.url, **{"think": "none", **settings}))
    assert result.status == "finished"
    records = list(read_run(out).records())
    assert [r for r in records if r.error is not None] == []
    for record in records:
        assert record.prompt_tokens_reported == record.prompt_tokens
        assert record.output_tokens == record.output_tokens_wanted
        # SGLang 0.5.23 says how long a request was queued, and that is part of its time to first token.
        assert record.queued_s is not None
        assert record.first_token_s is not None
        assert 0 <= record.queued_s <= record.first_token_s - record.sent_s
    return records


def off_theory(records: list[RequestRecord], page: int) -> list[str]:
    """Requests whose reported hit is not the theoretical one, told apart by whether it was ready in time."""
    found = []
    for r in records:
        instant, ready = (hit_tokens(lcp, r.prompt_tokens, page) for lcp in (r.shared_output_lcp, r.ready_lcp))
        if r.cached_tokens != instant:
            found.append(f"{r.session}/{r.flow}/{r.turn}: reported {r.cached_tokens}, instant {instant}, ready {ready}")
    return found


@pytest.mark.real_traces
def test_twenty_real_sessions_realize_the_theoretical_rate(
    tiny_server: TinyServer, weka_archive: Path, tmp_path: Path
) -> None:
    """A cache large enough for all of them: what the server hits is what the definition says, request by request."""
    records = run_replay(
        tiny_server, tmp_path / "run", trace=str(weka_archive), sessions=20, max_turns=8, tokens_per_block=2,
        max_output=4, concurrency=4,
    )  # fmt: skip
    assert len({r.session for r in records}) == 20
    assert len(records) >= 150
    report = summarize(*_parts(tmp_path / "run"))
    realized, aligned = report.rate("realized"), report.rate("aligned")
    assert realized is not None
    assert aligned is not None
    assert realized.rate > 0.5
    assert abs(realized.rate - aligned.rate) < 1e-4, off_theory(records, tiny_server.page_size)


def _parts(run: Path) -> tuple[object, ...]:
    loaded = load_run(run)
    return loaded.header, loaded.records, loaded.events


@pytest.mark.parametrize("sharing", ["session", "tools+system"])
def test_own_output_as_history_hits_what_was_generated(tiny_server: TinyServer, tmp_path: Path, sharing: str) -> None:
    records = run_replay(
        tiny_server,
        tmp_path / "run",
        trace=GENERATED,
        history="own",
        sharing=sharing,
        sessions=3,
        concurrency=1,
        max_output=40,
        max_turns=5,
    )
    assert off_theory(records, tiny_server.page_size) == []
    # the answer is part of what the next turn hits, which the recorded continuation never is
    assert sum(r.session_output_lcp for r in records) > sum(r.session_lcp for r in records)
    shared = sum(r.shared_lcp for r in records) - sum(r.session_lcp for r in records)
    assert (shared > 100) == (sharing == "tools+system")


def test_same_seed_same_tokens_and_same_answers(tiny_server: TinyServer, tmp_path: Path) -> None:
    first = run_replay(
        tiny_server, tmp_path / "a", trace=GENERATED, sessions=3, max_turns=5, concurrency=1, max_output=8
    )
    second = run_replay(
        tiny_server, tmp_path / "b", trace=GENERATED, sessions=3, max_turns=5, concurrency=3, max_output=8
    )
    answers = [{(r.session, r.flow, r.turn): r.output_sha256 for r in run} for run in (first, second)]
    assert answers[0] == answers[1]
    assert len(set(answers[0].values())) > len(first) // 2  # the prompts differ, and the answers follow them


def test_chat_completions_report_cached_tokens(tiny_server: TinyServer, tmp_path: Path) -> None:
    result = replay(
        ReplayConfig(
            trace=GENERATED, out=tmp_path / "run", url=tiny_server.url, client="openai", sessions=2, max_turns=4,
            think="none", concurrency=1, max_output=4, tokens_per_block=2,
        )
    )  # fmt: skip
    assert result.status == "finished"
    records = list(read_run(tmp_path / "run").records())
    assert [r.error for r in records if r.error is not None] == []
    assert all(r.cached_tokens is not None and r.prompt_tokens_reported for r in records)
    assert any(r.cached_tokens for r in records)


def test_the_report_credits_a_fast_path_by_the_servers_own_counter(tiny_server: TinyServer, tmp_path: Path) -> None:
    out = tmp_path / "run"
    records = run_replay(tiny_server, out, trace=GENERATED, sessions=2, max_turns=4, concurrency=1, max_output=4)
    said = CliRunner().invoke(report_command, [str(out), "--json", "-", "--no-html"])
    assert said.exit_code == 0, said.output
    audit = {line["path"]: line for line in json.loads(said.output)["audit"]}
    hits = sum(r.cached_tokens or 0 for r in records)
    assert hits > 0
    assert audit["radix hit"]["executed"] == hits  # of this run alone: the server has served others before
    assert audit["radix hit"]["verdict"] == "runs"
    assert audit["EAGLE3"]["verdict"] == "off"
    assert "Fast paths" in CliRunner().invoke(report_command, [str(out), "--no-html"]).output


@pytest.mark.last
def test_a_server_that_dies_leaves_a_run_that_reports_and_resumes(
    tiny_server: TinyServer, small_server: TinyServer, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = small_server.process
    config = ReplayConfig(
        trace=GENERATED, out=out, url=small_server.url, think="none", concurrency=2, max_output=12, max_turns=5
    )

    def kill_mid_run() -> None:
        lines = out / "requests.jsonl"
        while not lines.exists() or lines.read_bytes().count(b"\n") < 8:
            time.sleep(0.05)
        schedulers = psutil.Process(process.pid).children(recursive=True)
        for child in [*schedulers, psutil.Process(process.pid)]:
            child.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_mid_run, daemon=True)
    killer.start()
    result = replay(config, handle_signals=False)
    killer.join()
    assert result.status == "server_lost"
    process.stop()
    assert process.survivors() == []
    recorded = len([r for r in read_run(out).records() if r.error is None])
    assert recorded >= 8
    said = CliRunner().invoke(report_command, [str(out), "--no-html"])
    assert said.exit_code == 0
    assert "server" in said.output.lower()
    assert "lost" in said.output.lower()
    again = replay(resumed_config(out, url=tiny_server.url), resume=True)
    assert again.status == "finished"
    run = read_run(out)
    good = [r for r in run.records() if r.error is None]
    assert len({(r.session, r.flow, r.turn) for r in good}) == len(good) == run.header.requests
