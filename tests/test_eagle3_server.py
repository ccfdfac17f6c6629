"""EAGLE3 in a real SGLang server against the same without it: what is written, counted and reused."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eval.report import load_run, summarize
from tests.scripted_draft import expected_steps, key_of, write_script
from tests.servers import EAGLE3_KV_TOKENS, PAGE, TinyServer
from traces.replay import read_run
from traces.replay.config import ReplayConfig
from traces.replay.run import replay

pytestmark = pytest.mark.server

DRAFTS = 3
WANTED = 12


def say(server: TinyServer, known: dict[str, list[int]]) -> None:
    """What the server's draft knows from here on."""
    write_script(server.folder / "script.json", known)


def fifty_prompts(server: TinyServer) -> dict[str, tuple[list[int], list[int]]]:
    """Prompts and their greedy continuations from the server without EAGLE3: ten conversations over two heads, of five
    turns; a turn goes on from what the model wrote, so that it reuses what a verification left in the cache."""

    def some(rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(16, 250) for _ in range(count)]

    heads = [some(random.Random(count), count) for count in (384, 500)]

    def conversation(number: int) -> list[tuple[list[int], list[int]]]:
        rng, made = random.Random(f"4/{number}"), []
        prompt = heads[number % 2] + some(rng, 200 + 30 * number)
        for _ in range(5):
            # a few more than are asked for later: drafts reach beyond the end
            output = server.generate(prompt, WANTED + DRAFTS + 1)["output_ids"]
            made.append((prompt, output))
            prompt = prompt + output[:WANTED] + some(rng, rng.randrange(40, 200))
        return made

    with ThreadPoolExecutor(4) as pool:
        return {
            key_of(prompt): (prompt, output) for made in pool.map(conversation, range(10)) for prompt, output in made
        }


def test_fifty_greedy_outputs_are_those_without_drafts_under_rollback_hits_and_eviction(
    tiny_server: TinyServer, eagle3_server: TinyServer
) -> None:
    known = fifty_prompts(tiny_server)
    assert len(known) == 50
    say(eagle3_server, {key: output for key, (_, output) in known.items()})
    eagle3_server.flush()
    evicted_before = eagle3_server.total("sglang:evicted_tokens")
    steps_before = eagle3_server.total("agentserve_speculation_steps")
    accepted_before = eagle3_server.metric("agentserve_speculation_accepted_drafts")

    # The turns of a conversation one after the other, two conversations at once.
    prompts = [prompt for prompt, _ in known.values()]
    turns = [prompts[5 * i : 5 * i + 5] for i in range(10)]
    with ThreadPoolExecutor(2) as pool:
        played = list(pool.map(lambda mine: [eagle3_server.generate(p, WANTED) for p in mine], turns))
    answers = [answer for conversation in played for answer in conversation]

    total: Counter[int] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        continuation = known[key_of(prompt)][1]
        assert answer["output_ids"] == continuation[:WANTED]
        steps = Counter(expected_steps(continuation, WANTED, DRAFTS))
        reported = dict(enumerate(answer["meta_info"]["spec_correct_drafts_histogram"]))
        assert {n: c for n, c in reported.items() if c} == steps
        total += steps
    # Every number of accepted drafts, from none to all, happened often.
    assert min(total[n] for n in range(DRAFTS + 1)) >= 10, total

    assert eagle3_server.total("agentserve_speculation_steps") - steps_before == total.total()
    accepted = eagle3_server.metric("agentserve_speculation_accepted_drafts")
    for position in range(1, DRAFTS + 1):
        labels = f'{{mode="real",position="{position}"}}'
        wanted = sum(steps for drafts, steps in total.items() if drafts >= position)
        assert accepted[labels] - accepted_before.get(labels, 0) == wanted

    assert eagle3_server.total("sglang:evicted_tokens") - evicted_before > EAGLE3_KV_TOKENS / 2
    hits = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    assert hits > 0.3 * sum(map(len, prompts))


def test_a_cached_answer_is_continued_as_a_cold_one(tiny_server: TinyServer, eagle3_server: TinyServer) -> None:
    """The second turn reads whole pages that verification wrote, with rejected drafts among them."""
    rng = random.Random(9)
    prompt = [rng.randrange(16, 250) for _ in range(100)]
    long = tiny_server.generate(prompt, 164)["output_ids"]
    say(eagle3_server, {key_of(prompt): long})
    eagle3_server.flush()
    tiny_server.flush()
    assert eagle3_server.generate(prompt, 160)["output_ids"] == long[:160]
    following = prompt + long[:158] + [rng.randrange(16, 250) for _ in range(30)]
    warm = eagle3_server.generate(following, 8)
    assert warm["meta_info"]["cached_tokens"] == 2 * PAGE  # of 258 tokens, 158 of them written by the model
    assert warm["output_ids"] == tiny_server.generate(following, 8)["output_ids"]


def test_prefixes_that_end_on_a_page_hit_as_without_drafts(tiny_server: TinyServer, eagle3_server: TinyServer) -> None:
    """SGLang's keys of token pairs would lose the last page of every one of these."""
    rng = random.Random(5)

    def hits(server: TinyServer) -> list[int]:
        server.flush()
        return [server.generate(prompt, 2)["meta_info"]["cached_tokens"] for prompt in prompts]

    shared = [rng.randrange(16, 250) for _ in range(6 * PAGE)]
    prompts = [shared[: pages * PAGE] + [rng.randrange(16, 250) for _ in range(140)] for pages in (6, 5, 6, 3, 6)]
    found = hits(eagle3_server)
    assert found == [0, 5 * PAGE, 6 * PAGE, 3 * PAGE, 6 * PAGE]
    assert found == hits(tiny_server)


def test_a_replay_hits_the_same_with_and_without_drafts_and_reports_acceptance(
    tiny_server: TinyServer, eagle3_server: TinyServer, tmp_path: Path
) -> None:
    runs = {}
    for name, server in (("off", tiny_server), ("on", eagle3_server)):
        out = tmp_path / name
        # One after the other, so that both servers see the same order.
        trace = "generated:preset=tiny,sessions=1,seed=7"
        result = replay(
            ReplayConfig(out=out, url=server.url, trace=trace, think="none", max_turns=6, max_output=12, concurrency=1)
        )
        assert result.status == "finished"
        runs[name] = {(r.session, r.flow, r.turn): r for r in read_run(out).records()}
    assert runs["on"].keys() == runs["off"].keys()
    for key, on in runs["on"].items():
        off = runs["off"][key]
        assert on.error is None
        assert (on.cached_tokens, on.output_sha256) == (off.cached_tokens, off.output_sha256), key
        assert off.accepted_drafts is None
        steps = on.accepted_drafts or []
        # every step writes at least one token after the first, and the last step may write too many
        assert sum(steps) <= on.output_tokens - 1
        assert on.output_tokens - 1 <= sum((n + 1) * c for n, c in enumerate(steps)) <= on.output_tokens - 1 + DRAFTS
    assert sum(r.cached_tokens or 0 for r in runs["on"].values()) > 0

    loaded = load_run(tmp_path / "on")
    drafting = summarize(loaded.header, loaded.records, loaded.events).drafting
    assert drafting is not None
    assert (drafting.algorithm, drafting.mode, drafting.drafts) == ("EAGLE3", "real", DRAFTS)
    assert drafting.steps == sum(sum(r.accepted_drafts or []) for r in runs["on"].values())
    loaded = load_run(tmp_path / "off")
    assert summarize(loaded.header, loaded.records, loaded.events).drafting is None
