"""Which servers the tests share, and when each starts and ends.

A start takes most of a minute, nearly all of it imports on one core. So there is one server for each configuration,
and while tests use one, the next one that tests will need is on its way. A server ends after its last test: each
takes about 1.5 GB.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from agentserve.launch.host import free_port
from agentserve.launch.process import ServerProcess
from agentserve.launch.tiny import READY_TIMEOUT_S, tiny_server
from agentserve.runtime.policy_journal import JOURNAL_VARIABLE
from tests.scripted_draft import enable

PAGE = 128
PREFILL_CHUNK = 1024
SMALL_KV_TOKENS = 4096
PRESSED_KV_TOKENS = 3072
EAGLE3_KV_TOKENS = 5120  # half of what the 50 prompts of its test leave behind, room for two at once
REUSE_KV_TOKENS = 4096  # half of what the prompts of its tests leave behind

# Of the tiny M3's sparse layers 1..5.
REUSE = "freq:4"  # 1 and 5 choose, 2 to 4 take over
REUSE_LISTED = "layers:1,3"  # 1 chooses for 2, 3 for 4 and 5: no frequency does this
REUSE_TP = int(os.environ.get("AGENTSERVE_TEST_TP", "1"))

ADMIN_KEY = "k"  # of the servers that ask for one; the others ignore it


def _tiny(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": 262_144, "watch": True}


def _small(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": SMALL_KV_TOKENS, "kv_events": f"tcp://*:{free_port()}"}


def _lru(folder: Path) -> dict[str, Any]:
    log = ["--log-requests", "--log-requests-level=3", "--log-requests-format=json", f"--log-requests-target={folder}"]
    return {
        "kv.capacity_tokens": SMALL_KV_TOKENS,
        "radix.policy": "lru",
        "radix.truncate": False,
        "watch": True,
        "extra_args": [f"--admin-api-key={ADMIN_KEY}", *log],
    }


def _gate(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": SMALL_KV_TOKENS, "radix.policy": "gittins", "radix.admission": "gate:0.6"}


def _pressed(folder: Path) -> dict[str, Any]:
    return {
        "kv.capacity_tokens": PRESSED_KV_TOKENS,
        "prefill_chunk": 512,
        "radix.policy": "gittins",
        # It takes in more than it has memory for: it reckons with one token of each answer.
        "extra_args": ["--schedule-conservativeness=0.0"],
        "env": {JOURNAL_VARIABLE: str(folder / "run.journal"), "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"},
    }


def _eagle3(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": EAGLE3_KV_TOKENS, **_scripted(folder)}


def _reuse(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": REUSE_KV_TOKENS, "index_reuse": REUSE, "tp": REUSE_TP}


def _drafted_reuse(folder: Path) -> dict[str, Any]:
    return {"kv.capacity_tokens": REUSE_KV_TOKENS, "index_reuse": REUSE_LISTED, "tp": 2, **_scripted(folder)}


def _scripted(folder: Path) -> dict[str, Any]:
    from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3  # here: it imports torch

    draft = write_tiny_eagle3(folder / "draft")
    return {"eagle3.draft": str(draft), "env": dict(enable(folder / "plugin", folder / "script.json"))}


# Fixture -> fields of the recipe, given a folder of the server's own.
CONFIGURATIONS: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    "tiny_server": _tiny,
    "small_server": _small,
    "lru_server": _lru,
    "gate_server": _gate,
    "pressed_server": _pressed,
    "eagle3_server": _eagle3,
    "reuse_server": _reuse,
    "drafted_reuse_server": _drafted_reuse,
}


@dataclass(frozen=True)
class TinyServer:
    """The tiny M3 behind HTTP."""

    url: str
    checkpoint: Path
    page_size: int
    process: ServerProcess
    folder: Path  # of its own
    headers: Mapping[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {ADMIN_KEY}"})

    def post(self, path: str, **payload: Any) -> Any:
        response = httpx.post(self.url + path, json=payload, headers=self.headers, timeout=300)
        response.raise_for_status()
        return response.json() if response.headers.get("content-type", "").startswith("application/json") else None

    def flush(self) -> None:
        httpx.post(self.url + "/flush_cache", headers=self.headers, timeout=60).raise_for_status()

    def generate(self, ids: list[int], new_tokens: int, **options: Any) -> Any:
        """Greedy generation of exactly ``new_tokens`` tokens by SGLang's own endpoint."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", input_ids=ids, sampling_params=sampling, **options)

    def metric(self, name: str) -> dict[str, float]:
        """Values of a metric by its labels as written, ``{a="b"}``."""
        text = httpx.get(self.url + "/metrics", follow_redirects=True, timeout=60).text
        found = re.findall(rf"^{re.escape(name)}(?:_total)?(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def total(self, name: str) -> float:
        return sum(self.metric(name).values())


class _Started(NamedTuple):
    process: ServerProcess
    since: float
    stack: ExitStack  # closing it ends the server; harmless the second time


class Servers:
    """The servers of one session.

    Args:
        folder: of logs and what servers need.
        checkpoint: the tiny M3.
        wanted: server -> ids of the tests that use it, in the order of their first test.
    """

    def __init__(self, folder: Path, checkpoint: Path, wanted: Mapping[str, Collection[str]]) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._left = {name: set(tests) for name, tests in wanted.items()}
        self._started: dict[str, _Started] = {}

    def get(self, name: str) -> TinyServer:
        """A server that is ready. Raises ServerError."""
        process, since, _ = self._start(name)
        process.wait_ready(time.monotonic() - since + READY_TIMEOUT_S)
        following = (other for other, tests in self._left.items() if tests and other not in self._started)
        for other in following:
            self._start(other)
            break
        return TinyServer(process.plan.url, self._checkpoint, PAGE, process, self._folder / name)

    def finished(self, test: str) -> None:
        """A test is over: what no other one needs ends."""
        for name, tests in self._left.items():
            tests.discard(test)
            if not tests and name in self._started:
                self._started[name].stack.close()

    def close(self) -> None:
        for started in self._started.values():
            started.stack.close()

    def _start(self, name: str) -> _Started:
        if name not in self._started:
            folder = self._folder / name
            folder.mkdir()
            settings = {"prefill_chunk": PREFILL_CHUNK, **CONFIGURATIONS[name](folder)}
            stack = ExitStack()
            starting = tiny_server(settings, checkpoint=self._checkpoint, log=folder / "server.log", wait=False)
            process = stack.enter_context(starting)
            process.stop_timeout_s = 0.5  # SGLang looks for SIGTERM every five seconds, and there is nothing to finish
            self._started[name] = _Started(process, time.monotonic(), stack)
        return self._started[name]
