"""Shared fixtures. The tiny M3 runs once per session on real SGLang; tests flush its cache instead of restarting it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentserve.launch.plan import make_plan
from agentserve.launch.preflight import preflight
from agentserve.launch.process import ServerProcess
from agentserve.launch.recipe import Override, find_recipe, load_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
PREFILL_CHUNK = 1024
KV_TOKENS = 262_144


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


@pytest.fixture(scope="session")
def tiny_server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    overrides = {
        "model": str(tiny_checkpoint),
        "port": free_port(),
        "kv.capacity_tokens": KV_TOKENS,
        "prefill_chunk": PREFILL_CHUNK,
    }
    recipe = load_recipe(find_recipe("tiny-cpu"), [Override(k, v, "conftest") for k, v in overrides.items()])
    checked = preflight(recipe)
    assert checked.ok, checked.findings
    plan = make_plan(recipe, checked.facts, model=recipe.model, cwd=REPOSITORY)
    with ServerProcess(plan, tmp_path_factory.mktemp("server") / "server.log") as process:
        process.wait_ready(timeout_s=300)
        yield TinyServer(plan.url, tiny_checkpoint, 128, process)
