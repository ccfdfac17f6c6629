"""Shared fixtures. The tiny M3 runs once per session on real SGLang; tests flush its cache instead of restarting it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

from agentserve.launch.process import ServerProcess
from agentserve.launch.tiny import tiny_server

# Machines are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")

REPOSITORY = Path(__file__).resolve().parent.parent
PREFILL_CHUNK = 1024
KV_TOKENS = 262_144


@pytest.fixture(autouse=True)
def _settings_of_one_test_are_not_the_next_ones() -> Iterator[None]:
    """Settings reach SGLang's processes by environment: what a test leaves there switches on hooks in the others."""
    before = _own_variables()
    yield
    assert _own_variables() == before, "a test left agentserve's variables in the environment"


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AGENTSERVE_")}


def traces_folder() -> Path | None:
    """Real traces: $AGENTSERVE_TRACES, else ../shared/traces beside the checkout; None where there are none."""
    named = os.environ.get("AGENTSERVE_TRACES")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "traces"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def weka_archive() -> Path:
    folder = traces_folder()
    if folder is None or not (folder / "weka-claude-code.tar.xz").exists():
        pytest.skip("no real traces here; set AGENTSERVE_TRACES")
    return folder / "weka-claude-code.tar.xz"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentserve.checkpoint.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-m3")


@dataclass(frozen=True)
class TinyServer:
    """The tiny M3 behind HTTP."""

    url: str
    checkpoint: Path
    page_size: int
    process: ServerProcess

    def post(self, path: str, **payload: Any) -> Any:
        response = httpx.post(self.url + path, json=payload, timeout=120)
        response.raise_for_status()
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else None

    def flush(self) -> None:
        httpx.post(self.url + "/flush_cache", timeout=30).raise_for_status()

    def generate(self, ids: list[int], new_tokens: int, **options: Any) -> Any:
        """Greedy generation of exactly ``new_tokens`` tokens by SGLang's own endpoint."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", input_ids=ids, sampling_params=sampling, **options)


@pytest.fixture(scope="session", name="tiny_server")
def _tiny_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    settings = {"kv.capacity_tokens": KV_TOKENS, "prefill_chunk": PREFILL_CHUNK, "watch": True}
    log = tmp_path_factory.mktemp("server") / "server.log"
    with tiny_server(settings, checkpoint=tiny_checkpoint, log=log) as process:
        yield TinyServer(process.plan.url, tiny_checkpoint, 128, process)
