"""The tiny M3 on SGLang against transformers' own M3, by log-probabilities in float32.

A discrete choice (which key blocks, which experts) that hangs on less than float32 rounding may fall either way in
two correct programs, and then everything after it differs. Prompts are therefore drawn by seed and kept when the
*reference* decides every top-k of theirs by more than ``MARGIN``; what the server answers plays no part in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from agentserve.runtime import torchvision_operators
from tests.parity import MARGIN, TOLERANCE, ClosestChoice, difference
from tests.servers import PREFILL_CHUNK, TinyServer

torchvision_operators.declare()

from tests.reference_m3 import ReferenceM3  # noqa: E402

pytestmark = pytest.mark.server

PROMPTS = 20  # at least so many must remain
# Seeds whose prompts passed when they were looked for (0..44 tried), so that a test run need not search.
SEEDS = (0, 3, 6, 9, 12, 15, 18, 24, 1, 4, 7, 10, 13, 16, 22, 25, 28, 34, 2, 5, 17, 23, 29, 38, 44)
NEW_TOKENS = 8
CHOICE_BEGINS = 4 * 128  # topk_blocks * block_size of the tiny M3: longer contexts have blocks to leave out


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    output: list[int]  # greedy continuation by the reference's own log-probabilities of the server's tokens
    logprobs: torch.Tensor  # [len(ids) + NEW_TOKENS, vocab]


@pytest.fixture(scope="module")
def reference(tiny_server: TinyServer) -> ReferenceM3:
    return ReferenceM3(tiny_server.checkpoint)


def _draw(seed: int) -> list[int]:
    rng = random.Random(seed)
    short, long, chunked = rng.randint(1, 200), rng.randint(CHOICE_BEGINS + 1, 1000), rng.randint(1025, 2000)
    length = (short, long, chunked)[seed % 3]
    return [rng.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def prompts(tiny_server: TinyServer, reference: ReferenceM3) -> list[Prompt]:
    kept: list[Prompt] = []
    for seed in SEEDS:
        ids = _draw(seed)
        output = [entry[1] for entry in _meta(tiny_server, ids)["output_token_logprobs"]]
        with ClosestChoice() as choice:
            logprobs = reference.logprobs(ids + output)
        if choice.margin > MARGIN:
            kept.append(Prompt(ids, output, logprobs))
    lengths = [len(p.ids) for p in kept]
    print(f"kept {len(kept)} of {len(SEEDS)} prompts, lengths {sorted(lengths)}")
    assert len(kept) >= PROMPTS
    assert sum(n > CHOICE_BEGINS for n in lengths) >= 6, "too few prompts where block selection chooses"
    assert sum(n > PREFILL_CHUNK for n in lengths) >= 3, "too few prompts that are prefilled in chunks"
    return kept


def _meta(server: TinyServer, ids: list[int], **options: Any) -> Any:
    return server.generate(ids, NEW_TOKENS, return_logprob=True, **options)["meta_info"]


def _cached_differences(server: TinyServer, prompt: Prompt) -> tuple[float, int]:
    """Repeat a prompt so that its full pages hit; deviation of the recomputed tail and the output, and the hit."""
    page = server.page_size
    expected = (len(prompt.ids) - 1) // page * page
    meta = _meta(server, prompt.ids, logprob_start_len=expected)
    tail = difference(meta["input_token_logprobs"][1:], prompt.logprobs, expected + 1)
    output = difference(meta["output_token_logprobs"], prompt.logprobs, len(prompt.ids))
    assert meta["cached_tokens"] == expected
    return max(tail, output), expected


def test_cold_prefill_chunked_prefill_and_decode(tiny_server: TinyServer, prompts: list[Prompt]) -> None:
    for prompt in prompts:
        tiny_server.flush()
        meta = _meta(tiny_server, prompt.ids, logprob_start_len=0)
        assert meta["cached_tokens"] == 0
        assert len(meta["input_token_logprobs"]) == len(prompt.ids)
        assert difference(meta["input_token_logprobs"], prompt.logprobs, 0) < TOLERANCE
        assert difference(meta["output_token_logprobs"], prompt.logprobs, len(prompt.ids)) < TOLERANCE


def test_cached_prefix(tiny_server: TinyServer, prompts: list[Prompt]) -> None:
    hits = 0
    for prompt in prompts:
        tiny_server.flush()
        tiny_server.generate(prompt.ids, 1)
        deviation, hit = _cached_differences(tiny_server, prompt)
        assert deviation < TOLERANCE
        hits += hit
    assert hits > 0


def test_greedy_output_is_the_references_argmax(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        rows = prompt.logprobs[len(prompt.ids) - 1 : -1]
        assert prompt.output == rows.argmax(dim=-1).tolist()


@contextmanager
def _interleaved_experts() -> Iterator[None]:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLExperts as Experts

    right = Experts._apply_gate

    def wrong(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        return right(self, torch.cat([gate_up[..., ::2], gate_up[..., 1::2]], dim=-1))

    Experts._apply_gate = wrong
    try:
        yield
    finally:
        Experts._apply_gate = right


@contextmanager
def _worst_blocks() -> Iterator[None]:
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLIndexer as Indexer

    right = Indexer.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        chosen = right(self, *args, **kwargs).clone()
        # swap one chosen block for block 0 where it was not chosen
        chosen[..., -1] = torch.where((chosen == 0).any(-1) | (chosen[..., -1] < 0), chosen[..., -1], 0)
        return chosen

    Indexer.forward = wrong
    try:
        yield
    finally:
        Indexer.forward = right


@pytest.mark.parametrize("broken", [_interleaved_experts, _worst_blocks], ids=["moe-activation", "block-selection"])
def test_the_comparison_sees_a_broken_model(
    broken: Any, tiny_server: TinyServer, reference: ReferenceM3, prompts: list[Prompt]
) -> None:
    """One MoE activation or one chosen block in sixteen different, and the deviation is far over the tolerance."""
    prompt = max(prompts, key=lambda p: len(p.ids))
    tiny_server.flush()
    meta = _meta(tiny_server, prompt.ids, logprob_start_len=0)
    with broken():
        wrong = reference.logprobs(prompt.ids + prompt.output)
    assert difference(meta["input_token_logprobs"], wrong, 0) > 100 * TOLERANCE


def test_the_comparison_sees_a_wrong_cached_prefix(
    tiny_server: TinyServer, reference: ReferenceM3, prompts: list[Prompt]
) -> None:
    """A cache that served another prefix's pages would shift the tail's log-probabilities."""
    prompt = max(prompts, key=lambda p: len(p.ids))
    other = [(token + 1) % 256 for token in prompt.ids[:128]] + prompt.ids[128:]
    tiny_server.flush()
    tiny_server.generate(other, 1)
    meta = _meta(tiny_server, other)
    assert meta["cached_tokens"] > 0
    assert difference(meta["output_token_logprobs"], prompt.logprobs, len(prompt.ids)) > 100 * TOLERANCE
