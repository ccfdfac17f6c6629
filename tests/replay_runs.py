"""Replays for tests: run one, and what of its records must not depend on time."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from agentserve.cli.replay import command
from tests.replay_server import InThread, ReplayServer
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import RunResult, replay
from traces.replay.store import read_run

PER_SESSION = 8  # requests of one session of `write_trace(turns=6)`
VOCAB = (100, 400)


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


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    return result.exit_code, result.output


def with_output(trace: Path, tokens: int) -> Path:
    """Let each request of a written trace answer so many tokens."""
    for file in trace.iterdir():
        content = json.loads(file.read_text())
        for request in content["requests"]:
            for each in request.get("requests", [request]):
                each["out"] = tokens
        file.write_text(json.dumps(content))
    return trace
