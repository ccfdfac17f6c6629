"""Index reuse on real SGLang against a transformers M3 whose indexers are shared by the same pattern, in float32.

One server more. ``AGENTSERVE_TEST_TP=2`` runs the same on two ranks, ``AGENTSERVE_TEST_EAGLE3=1`` with a scripted,
partly wrong draft, so that every token after the first comes from the verification of a chain. Prompts are kept by
the rule of ``test_m3_parity``: the reference decides every top-k of theirs by more than a margin.
"""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agentserve.runtime import torchvision_operators
from agentserve.runtime.index_reuse import ReusePattern, parse_index_reuse
from offload.state import shareable_layers
from tests.parity import MARGIN, TOLERANCE, ClosestChoice, difference
from tests.scripted_draft import key_of, write_script
from tests.servers import PREFILL_CHUNK, REUSE, REUSE_EAGLE3, REUSE_KV_TOKENS, TinyServer

torchvision_operators.declare()

from tests.reference_m3 import ReferenceM3  # noqa: E402

pytestmark = pytest.mark.server

STEP = "verify" if REUSE_EAGLE3 else "decode"  # the mode of a pass that writes tokens
NEW_TOKENS = 8
LENGTHS = (40, 150, 700, 950, 1100, 1300, 1600, 1750)
KEPT = 6  # at least so many of them


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    output: list[int]
    logprobs: torch.Tensor  # [len(ids) + NEW_TOKENS, vocab], by the sharing reference


@pytest.fixture(scope="module")
def server(reuse_server: TinyServer) -> TinyServer:
    return reuse_server


@pytest.fixture(scope="module")
def pattern(tiny_checkpoint: Path) -> ReusePattern:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    return parse_index_reuse(REUSE).pattern(shareable_layers(config))


@pytest.fixture(scope="module")
def prompts(server: TinyServer, pattern: ReusePattern) -> list[Prompt]:
    reference = ReferenceM3(server.checkpoint)
    reference.share_selections(pattern.source_of)
    kept = []
    for length in LENGTHS:
        rng = random.Random(length)
        ids = [rng.randrange(256) for _ in range(length)]
        output = server.generate(ids, NEW_TOKENS)["output_ids"]
        with ClosestChoice() as choice:
            logprobs = reference.logprobs(ids + output)
        if choice.margin > MARGIN:
            kept.append(Prompt(ids, output, logprobs))
    lengths = [len(prompt.ids) for prompt in kept]
    print(f"kept prompts of {lengths} tokens")
    assert len(kept) >= KEPT
    assert max(lengths) > PREFILL_CHUNK, "no prompt that is prefilled in chunks"
    if REUSE_EAGLE3:  # from here on drafts are right in part
        more = {key_of(p.ids): p.output + [0] * 4 for p in kept}  # drafts reach beyond the end
        write_script(server.folder / "script.json", more)
    return kept


def meta(server: TinyServer, ids: list[int], **options: Any) -> Any:
    return server.generate(ids, NEW_TOKENS, return_logprob=True, **options)["meta_info"]


def test_cold_prefill_chunked_prefill_and_decode(server: TinyServer, prompts: list[Prompt]) -> None:
    worst = 0.0
    for prompt in prompts:
        server.flush()
        got = meta(server, prompt.ids, logprob_start_len=0)
        assert got["cached_tokens"] == 0
        assert len(got["input_token_logprobs"]) == len(prompt.ids)
        worst = max(worst, difference(got["input_token_logprobs"], prompt.logprobs, 0))
        worst = max(worst, difference(got["output_token_logprobs"], prompt.logprobs, len(prompt.ids)))
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst < TOLERANCE


def test_cached_prefix(server: TinyServer, prompts: list[Prompt]) -> None:
    hits = 0
    for prompt in prompts:
        server.flush()
        server.generate(prompt.ids, 1)
        expected = (len(prompt.ids) - 1) // server.page_size * server.page_size
        got = meta(server, prompt.ids, logprob_start_len=expected)
        assert got["cached_tokens"] == expected
        assert difference(got["input_token_logprobs"][1:], prompt.logprobs, expected + 1) < TOLERANCE
        assert difference(got["output_token_logprobs"], prompt.logprobs, len(prompt.ids)) < TOLERANCE
        hits += expected
    assert hits > 0


def test_hits_between_evictions(server: TinyServer, prompts: list[Prompt]) -> None:
    """Each prompt twice in a row, behind the others: the first time it may find little, the second time all."""
    server.flush()
    before, hits = server.total("sglang:evicted_tokens"), 0
    for prompt in prompts + prompts[::-1]:
        for _ in range(2):
            got = meta(server, prompt.ids)
            hits += got["cached_tokens"]
            assert difference(got["output_token_logprobs"], prompt.logprobs, len(prompt.ids)) < TOLERANCE
        assert got["cached_tokens"] == (len(prompt.ids) - 1) // server.page_size * server.page_size
    assert hits > 0
    assert server.total("sglang:evicted_tokens") - before > REUSE_KV_TOKENS / 2


def test_greedy_output_is_the_sharing_references_argmax(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        assert prompt.output == prompt.logprobs[len(prompt.ids) - 1 : -1].argmax(dim=-1).tolist()


def test_the_comparison_sees_layers_that_choose_for_themselves(server: TinyServer, prompts: list[Prompt]) -> None:
    """Against the model that does not share, the same answers are far off."""
    prompt = max(prompts, key=lambda p: len(p.ids))
    server.flush()
    got = meta(server, prompt.ids, logprob_start_len=0)
    alone = ReferenceM3(server.checkpoint).logprobs(prompt.ids + prompt.output)
    assert difference(got["input_token_logprobs"], alone, 0) > 100 * TOLERANCE


def counters(server: TinyServer) -> dict[tuple[str, str, int], float]:
    """Executed counters by event, mode and layer, once all passes so far are published."""
    time.sleep(1.1)
    server.generate([1, 2, 3], 1)
    text = httpx.get(server.url + "/metrics", timeout=30).text
    found = re.findall(r'^agentserve_index_(\w+)_total\{layer="(\d+)",mode="(\w+)"\} (\S+)', text, re.MULTILINE)
    return {(event, mode, int(layer)): float(value) for event, layer, mode, value in found}


def test_executed_counters_tell_who_chose_and_who_took_over(server: TinyServer, pattern: ReusePattern) -> None:
    server.flush()
    before = counters(server)
    server.generate([random.Random(7).randrange(256) for _ in range(PREFILL_CHUNK + 200)], NEW_TOKENS)
    growth = {key: value - before.get(key, 0) for key, value in counters(server).items()}
    # Two chunks, and the request that made the first reading publish.
    extends = {layer: growth["selections_computed", "extend", layer] for layer in pattern.sources}
    assert set(extends.values()) == {3.0}
    steps = {layer: growth["selections_computed", STEP, layer] for layer in pattern.sources}
    assert len(set(steps.values())) == 1
    assert min(steps.values()) >= NEW_TOKENS - 1  # without drafts, or with none for this prompt
    for mode, passes in (("extend", extends), (STEP, steps)):
        for layer in pattern.reusers:
            source = pattern.source_of[layer]
            assert growth["selections_reused", mode, layer] == passes[source]
            assert growth["producers_skipped", mode, layer] == passes[source]
            assert ("selections_computed", mode, layer) not in growth
