"""Our policies in a real SGLang server, against the same server without them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from agentserve.launch.tiny import tiny_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

KV_TOKENS = 8192
PAGE = 128


class Answer(NamedTuple):
    output: tuple[int, ...]
    cached: int


class Client:
    """SGLang's own endpoints."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=240)

    def generate(self, ids: list[int], new: int, *, session: str | None = None, stop: str | None = None) -> Answer:
        sampling: dict[str, Any] = {"max_new_tokens": new, "temperature": 0, "ignore_eos": True}
        if stop is not None:
            sampling["custom_params"] = {"agentserve_stop": stop}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling}
        if session is not None:
            body["session_id"] = session
        response = self.http.post("/generate", json=body)
        response.raise_for_status()
        made = response.json()
        return Answer(tuple(made["output_ids"]), made["meta_info"]["cached_tokens"])

    def metric(self, name: str) -> dict[str, float]:
        """Values of a metric by its labels as written."""
        text = self.http.get("/metrics").text
        found = re.findall(rf"^{re.escape(name)}(?:_total)?(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def total(self, name: str) -> float:
        return sum(self.metric(name).values())


@contextmanager
def served(checkpoint: Path, log: Path, retract: bool = False, **radix: Any) -> Iterator[Client]:
    overrides: dict[str, Any] = {
        "kv.capacity_tokens": KV_TOKENS,
        "prefill_chunk": 1024,
        # SGLang's own switch: requests of a running batch are taken back now and then.
        "env": {"SGLANG_TEST_RETRACT": "1"} if retract else {},
        **{f"radix.{name}": value for name, value in radix.items()},
    }
    with tiny_server(overrides, checkpoint=checkpoint, log=log) as server:
        yield Client(server.plan.url)


def turns(seed: int) -> list[tuple[int, list[int]]]:
    """(conversation, prompt) of conversations that together need about twice the cache and now and then fork."""
    rng = random.Random(seed)
    head = [rng.randrange(16, 300) for _ in range(300)]
    live = [head + [rng.randrange(16, 300) for _ in range(700)] for _ in range(10)]
    made = []
    for _ in range(36):
        who = min(int(rng.expovariate(0.3)), 9)
        if rng.random() < 0.15:
            live[who] = live[who][: rng.randrange(600, len(live[who]))]
        live[who] = live[who] + [rng.randrange(16, 300) for _ in range(rng.randrange(50, 400))]
        made.append((who, live[who]))
    return made


def one_by_one(client: Client) -> list[Answer]:
    return [client.generate(prompt, 4, stop="tool_use") for _, prompt in turns(3)]


def all_at_once(client: Client) -> list[Answer]:
    """Requests that run in one batch."""
    rng = random.Random(5)
    prompts = [[rng.randrange(16, 300) for _ in range(900)] for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda ids: client.generate(ids, 40), prompts))


class Observed(NamedTuple):
    sequential: list[Answer]
    concurrent: list[Answer]
    evicted: float
    retracted: float
    ours: float  # tokens that our counters know of


def observe(checkpoint: Path, log: Path, retract: bool = False, **radix: Any) -> Observed:
    with served(checkpoint, log, retract, **radix) as client:
        sequential = one_by_one(client)
        evicted = client.total("sglang:evicted_tokens")
        ours = client.total("agentserve_evicted_tokens")
        concurrent = all_at_once(client)
        retracted = client.total("sglang:num_retracted_requests")
        return Observed(sequential, concurrent, evicted, retracted, ours)


@pytest.fixture(scope="module")
def without(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Observed:
    return observe(tiny_checkpoint, tmp_path_factory.mktemp("off") / "server.log")


def test_lru_through_our_policy_is_sglangs_lru(without: Observed, tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen = observe(tiny_checkpoint, tmp_path / "server.log", policy="lru", truncate=False)
    assert [a.cached for a in seen.sequential] == [a.cached for a in without.sequential]
    assert seen.sequential == without.sequential
    assert (seen.evicted, seen.ours) == (without.evicted, without.evicted)
    assert without.evicted > KV_TOKENS
    assert without.ours == 0


def test_gittins_changes_no_answer_even_of_retracted_requests(
    without: Observed, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    seen = observe(tiny_checkpoint, tmp_path / "server.log", retract=True, policy="gittins")
    assert [a.output for a in seen.sequential] == [a.output for a in without.sequential]
    assert [a.output for a in seen.concurrent] == [a.output for a in without.concurrent]
    assert seen.retracted > 0 == without.retracted
    assert [a.cached for a in seen.sequential] != [a.cached for a in without.sequential]
    assert seen.ours == seen.evicted > 0


def test_sessions_end_wait_and_are_counted(tiny_checkpoint: Path, tmp_path: Path) -> None:
    rng = random.Random(9)

    def prompt() -> list[int]:
        return [rng.randrange(16, 300) for _ in range(2560)]

    with served(tiny_checkpoint, tmp_path / "server.log", policy="gittins", admission="gate:0.6") as client:
        first, second, third = prompt(), prompt(), prompt()
        client.generate(first, 2, session="first", stop="tool_use")
        client.generate(second, 2, session="second", stop="tool_use")
        with ThreadPoolExecutor(1) as pool:
            # 5,120 of 8,192 tokens are taken: the third session waits, the first goes on.
            waiting = pool.submit(client.generate, third, 2, session="third", stop="tool_use")
            deadline = time.monotonic() + 30
            while client.total("agentserve_sessions_waiting") != 1 and time.monotonic() < deadline:
                time.sleep(0.1)
            assert client.total("agentserve_sessions_waiting") == 1
            longer = [*first, *prompt()[:256]]
            assert client.generate(longer, 2, session="first").cached == 2560
            assert not waiting.done()
            assert client.http.post("/close_session", json={"session_id": "second"}).status_code == 200
            assert waiting.result(60).cached == 0
        assert client.total("agentserve_sessions_waiting") == 0
        # Room for more is taken from the session that ended, though others were used less recently.
        assert client.generate(prompt()[:1280], 2, session="first/side").cached == 0
        assert client.total("agentserve_evicted_tokens") > 0
        victims = client.metric("agentserve_evicted_tokens")
        assert all('victim="ended"' in labels for labels, tokens in victims.items() if tokens), victims
        assert client.generate([*longer, *prompt()[:128]], 2, session="first").cached >= 2816
        client.http.post("/close_session", json={"session_id": "third"}).raise_for_status()
        assert client.generate(second, 2, session="second").cached < 2560  # it may come back, as a new session
