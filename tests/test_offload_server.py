"""The tiny M3 on real SGLang servers with a real LMCache daemon: the same answers, full hits and partial ones."""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from agentserve.launch.process import ServerProcess
from agentserve.launch.tiny import READY_TIMEOUT_S, tiny_server
from offload.daemon import DaemonSpec
from offload.segments import stale_segments

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

NEW = 8
LENGTHS = (300, 1100, 2500, 8000)


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: int
    restored: int  # of the cached tokens, those that came from LMCache


class Client:
    """SGLang's own endpoints."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600)

    def generate(self, ids: list[int], *, new: int = NEW, **fields: Any) -> Answer:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": new, "temperature": 0, "ignore_eos": True},
            "return_logprob": True,
            **fields,
        }
        response = self.http.post("/generate", json=body)
        response.raise_for_status()
        meta = response.json()["meta_info"]
        values = meta["output_token_logprobs"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            tuple(token for _, token, *_ in values),
            tuple(value for value, *_ in values),
            meta["cached_tokens"],
            details.get("storage", 0),
        )

    def flush(self) -> None:
        """Empty the device's cache; refused while stores are under way."""
        for _ in range(600):
            if self.http.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the cache cannot be flushed")

    def counter(self, name: str, **labels: str) -> float:
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(name) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total


def prompts() -> dict[int, list[int]]:
    rng = random.Random(5)
    return {length: [rng.randrange(16, 300) for _ in range(length)] for length in LENGTHS}


def branch(prompt: list[int]) -> list[int]:
    """A prompt that shares two thirds of another and goes on differently."""
    rng = random.Random(len(prompt))
    return prompt[: 2 * len(prompt) // 3] + [rng.randrange(16, 300) for _ in range(200)]


def close(left: Answer, right: Answer) -> bool:
    """Equal tokens, and log-probabilities equal to float32's rounding of another order of sums."""
    return left.tokens == right.tokens and all(
        abs(a - b) < 1e-4 for a, b in zip(left.logprobs, right.logprobs, strict=True)
    )


def test_restored_prefixes_give_the_same_answers_after_the_server_that_stored_them_is_gone(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    spec = DaemonSpec("127.0.0.1", free_port(), free_port(), 256, 1.0)
    settings = {
        "kv.capacity_tokens": 16384,
        "prefill_chunk": 1024,
        "offload.backend": "lmcache",
        "offload.address": f"127.0.0.1:{spec.port}",
    }

    def server(name: str) -> AbstractContextManager[ServerProcess]:
        return tiny_server(settings, checkpoint=tiny_checkpoint, log=tmp_path / f"{name}.log", wait=False)

    # Both start at once, for time; only the daemon is common to them.
    with Daemon(daemon_plan(spec, tmp_path), tmp_path / "lmcache.log"), server("second") as second:
        with server("first") as first:
            first.wait_ready(READY_TIMEOUT_S)
            client = Client(first.plan.url)
            cold = {length: client.generate(ids) for length, ids in prompts().items()}
            assert all(answer.cached == 0 for answer in cold.values())
            client.flush()
            branches = {length: client.generate(branch(ids)) for length, ids in prompts().items()}
            for length, answer in branches.items():
                expected = 2 * length // 3 // 256 * 256
                assert (answer.cached, answer.restored) == (expected, expected)
            assert client.counter("agentserve_offload_tokens_total", event="stored") > sum(LENGTHS) - 256 * 8
            assert client.counter("agentserve_offload_tokens_total", event="refused") == 0
            assert client.counter("agentserve_offload_online") == 1
        second.wait_ready(2 * READY_TIMEOUT_S)
        client = Client(second.plan.url)
        for length, ids in prompts().items():
            again = client.generate(ids)
            assert again.restored == (length - 1) // 256 * 256
            assert close(again, cold[length])
            if length != 2500:  # of that one the device holds a page more than LMCache's whole chunks
                hit = client.generate(ids)
                assert (hit.cached, hit.restored) == (again.cached, 0)
                assert hit[:2] == again[:2]  # to the last bit: nothing but the place of the prefix differs
        # Part in the device's cache, part in LMCache's.
        client.flush()
        long = prompts()[8000]
        client.generate(long[:1024])
        again = client.generate(long)
        assert (again.cached, again.restored) == (7936, 7936 - 1024)
        assert close(again, cold[8000])
        verified = client.counter("agentserve_offload_tokens_total", event="verified")
        assert verified == client.counter("agentserve_offload_tokens_total", event="restored") > 0
        # The branches were computed on restored prefixes: now without a cache, for comparison.
        client.http.post("/hicache/storage-backend/clear")
        for length, ids in prompts().items():
            client.flush()
            assert close(branches[length], client.generate(branch(ids)))
    assert not stale_segments()
