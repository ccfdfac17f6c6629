"""Our policies in a real SGLang server, against the same server without them."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import pytest

from tests.servers import SMALL_KV_TOKENS, TinyServer

pytestmark = pytest.mark.server


class Answer(NamedTuple):
    output: tuple[int, ...]
    cached: int


def ask(server: TinyServer, ids: list[int], new: int, *, session: str | None = None, stop: str = "tool_use") -> Answer:
    sampling = {
        "max_new_tokens": new, "temperature": 0, "ignore_eos": True, "custom_params": {"agentserve_stop": stop},
    }  # fmt: skip
    made = server.post("/generate", input_ids=ids, sampling_params=sampling, session_id=session)
    return Answer(tuple(made["output_ids"]), made["meta_info"]["cached_tokens"])


def turns(seed: int) -> list[list[int]]:
    """Prompts of conversations that together need about twice the cache and now and then fork."""
    rng = random.Random(seed)
    head = [rng.randrange(16, 300) for _ in range(300)]
    live = [head + [rng.randrange(16, 300) for _ in range(500)] for _ in range(8)]
    made = []
    for _ in range(24):
        who = min(int(rng.expovariate(0.3)), 7)
        if rng.random() < 0.15:
            live[who] = live[who][: rng.randrange(450, len(live[who]))]
        live[who] = live[who] + [rng.randrange(16, 300) for _ in range(rng.randrange(50, 250))]
        made.append(live[who])
    return made


class Observed(NamedTuple):
    answers: list[Answer]
    evicted: float
    ours: float  # of the evicted tokens, those that our counters know of


def observe(server: TinyServer) -> Observed:
    server.flush()
    counters = ("sglang:evicted_tokens", "agentserve_evicted_tokens")
    before = [server.total(name) for name in counters]
    answers = [ask(server, prompt, 3) for prompt in turns(3)]
    evicted, ours = (server.total(name) - earlier for name, earlier in zip(counters, before, strict=True))
    return Observed(answers, evicted, ours)


def test_lru_through_our_policy_is_sglangs_lru(small_server: TinyServer, lru_server: TinyServer) -> None:
    without, seen = observe(small_server), observe(lru_server)
    assert [a.cached for a in seen.answers] == [a.cached for a in without.answers]
    assert seen.answers == without.answers
    assert (seen.evicted, seen.ours) == (without.evicted, without.evicted)
    assert without.evicted > SMALL_KV_TOKENS
    assert without.ours == 0
    assert sum(a.cached for a in without.answers) > SMALL_KV_TOKENS


def test_sessions_end_wait_and_are_counted(gate_server: TinyServer) -> None:
    server, rng = gate_server, random.Random(9)

    def prompt() -> list[int]:
        return [rng.randrange(16, 300) for _ in range(1280)]

    def waiting_sessions() -> float:
        return server.total("agentserve_sessions_waiting")

    first, second, third = prompt(), prompt(), prompt()
    ask(server, first, 2, session="first")
    ask(server, second, 2, session="second")
    with ThreadPoolExecutor(1) as pool:
        # 2,564 of 4,096 tokens are taken: the third session waits, the first goes on.
        waiting = pool.submit(ask, server, third, 2, session="third")
        deadline = time.monotonic() + 120
        while waiting_sessions() != 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert waiting_sessions() == 1
        longer = [*first, *prompt()[:128]]
        assert ask(server, longer, 2, session="first").cached == 1280
        assert not waiting.done()
        assert close(server, "second") == 200
        assert waiting.result(300).cached == 0
    assert waiting_sessions() == 0
    # Room for more is taken from the session that ended, though others were used less recently.
    assert ask(server, prompt()[:640], 2, session="first/side").cached == 0
    assert server.total("agentserve_evicted_tokens") > 0
    victims = server.metric("agentserve_evicted_tokens")
    assert all('victim="ended"' in labels for labels, tokens in victims.items() if tokens), victims
    assert ask(server, [*longer, *prompt()[:128]], 2, session="first").cached >= 1408
    assert close(server, "third") == 200
    assert ask(server, second, 2, session="second").cached < 1280  # it may come back, as a new session


def close(server: TinyServer, session: str) -> int:
    return httpx.post(f"{server.url}/close_session", json={"session_id": session}, timeout=120).status_code
