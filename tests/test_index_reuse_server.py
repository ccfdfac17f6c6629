"""Index reuse on real SGLang against a transformers M3 whose indexers are shared by the same pattern, in float32.

The same on two servers: one rank with a frequency, which decodes (``AGENTSERVE_TEST_TP=2``: two), and two ranks with
listed layers and a scripted, partly wrong draft, where every token after the first comes from the verification of a
chain. Prompts are kept by the rule of ``test_m3_parity``: the reference decides every top-k of theirs by more than a
margin.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from click.testing import CliRunner

from agentserve.cli.audit import command
from agentserve.runtime import torchvision_operators
from agentserve.runtime.index_reuse import ReusePattern, parse_index_reuse
from offload.state import shareable_layers
from tests.parity import MARGIN, TOLERANCE, ClosestChoice, difference
from tests.scripted_draft import expected_steps, key_of, write_script
from tests.servers import PREFILL_CHUNK, REUSE, REUSE_KV_TOKENS, REUSE_LISTED, TinyServer

torchvision_operators.declare()

from tests.reference_m3 import ReferenceM3  # noqa: E402

pytestmark = pytest.mark.server

NEW_TOKENS = 8
DRAFTS = 3
LENGTHS = (40, 150, 700, 950, 1100, 1300, 1600, 1750)
KEPT = 6  # at least so many of them


@dataclass(frozen=True)
class Case:
    """A server with index reuse: its setting, and the mode of a pass that writes tokens."""

    setting: str
    step: str


CASES = {"reuse_server": Case(REUSE, "decode"), "drafted_reuse_server": Case(REUSE_LISTED, "verify")}


@dataclass(frozen=True)
class Prompt:
    ids: list[int]
    output: list[int]
    longer: list[int]  # goes on from ``output``: drafts reach beyond the end
    logprobs: torch.Tensor  # [len(ids) + NEW_TOKENS, vocab], by the sharing reference


@pytest.fixture(scope="module", params=CASES)
def server(request: pytest.FixtureRequest) -> TinyServer:
    server: TinyServer = request.getfixturevalue(request.param)
    return server


@pytest.fixture(scope="module")
def case(server: TinyServer) -> Case:
    return CASES[server.folder.name]


@pytest.fixture(scope="module")
def pattern(tiny_checkpoint: Path, case: Case) -> ReusePattern:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    return parse_index_reuse(case.setting).pattern(shareable_layers(config))


@pytest.fixture(scope="module")
def prompts(server: TinyServer, case: Case, pattern: ReusePattern) -> list[Prompt]:
    reference = ReferenceM3(server.checkpoint)
    reference.share_selections(pattern.source_of)
    kept = []
    for length in LENGTHS:
        rng = random.Random(length)
        ids = [rng.randrange(256) for _ in range(length)]
        longer = server.generate(ids, NEW_TOKENS + DRAFTS + 1)["output_ids"]
        output = longer[:NEW_TOKENS]
        with ClosestChoice() as choice:
            logprobs = reference.logprobs(ids + output)
        if choice.margin > MARGIN:
            kept.append(Prompt(ids, output, longer, logprobs))
    lengths = [len(prompt.ids) for prompt in kept]
    print(f"kept prompts of {lengths} tokens")
    assert len(kept) >= KEPT
    assert max(lengths) > PREFILL_CHUNK, "no prompt that is prefilled in chunks"
    if case.step == "verify":  # from here on drafts are right in part
        write_script(server.folder / "script.json", {key_of(p.ids): p.longer for p in kept})
    return kept


def meta(server: TinyServer, ids: list[int], **options: Any) -> Any:
    return server.generate(ids, NEW_TOKENS, return_logprob=True, **options)["meta_info"]


def test_cold_prefill_chunked_prefill_and_decode(server: TinyServer, case: Case, prompts: list[Prompt]) -> None:
    worst, accepted = 0.0, Counter[int]()
    for prompt in prompts:
        server.flush()
        got = meta(server, prompt.ids, logprob_start_len=0)
        assert got["cached_tokens"] == 0
        assert len(got["input_token_logprobs"]) == len(prompt.ids)
        worst = max(worst, difference(got["input_token_logprobs"], prompt.logprobs, 0))
        worst = max(worst, difference(got["output_token_logprobs"], prompt.logprobs, len(prompt.ids)))
        correct = got.get("spec_correct_drafts_histogram")
        if correct is not None:
            steps = Counter(expected_steps(prompt.longer, NEW_TOKENS, DRAFTS))
            assert {n: count for n, count in enumerate(correct) if count} == steps
            accepted += steps
    print(f"largest difference of a log-probability: {worst:.1e}")
    assert worst < TOLERANCE
    # Drafts were accepted, rolled back, and in a run all of them.
    assert case.step == "decode" or min(accepted[0], accepted[1] + accepted[2], accepted[DRAFTS]) > 0


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


def test_executed_counters_tell_who_chose_and_who_took_over(
    server: TinyServer, case: Case, pattern: ReusePattern
) -> None:
    server.flush()
    before = counters(server)
    server.generate([random.Random(7).randrange(256) for _ in range(PREFILL_CHUNK + 200)], NEW_TOKENS)
    growth = {key: value - before.get(key, 0) for key, value in counters(server).items()}
    # Two chunks, and the request that made the first reading publish.
    extends = {layer: growth["selections_computed", "extend", layer] for layer in pattern.sources}
    assert set(extends.values()) == {3.0}
    steps = {layer: growth["selections_computed", case.step, layer] for layer in pattern.sources}
    assert len(set(steps.values())) == 1
    assert min(steps.values()) >= NEW_TOKENS - 1  # without drafts, or with none for this prompt
    for mode, passes in (("extend", extends), (case.step, steps)):
        for layer in pattern.reusers:
            source = pattern.source_of[layer]
            assert growth["selections_reused", mode, layer] == passes[source]
            assert growth["producers_skipped", mode, layer] == passes[source]
            assert ("selections_computed", mode, layer) not in growth


def test_the_audit_credits_what_ran_and_leaves_nothing_open(server: TinyServer, case: Case) -> None:
    server.flush()
    prompt = [random.Random(8).randrange(256) for _ in range(300)]
    for _ in range(2):
        server.generate(prompt, NEW_TOKENS)
    counters(server)  # all of them are published
    result = CliRunner().invoke(command, [server.url, "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["path"]: row for row in json.loads(result.stdout)}
    assert [path for path, row in rows.items() if None in (row["configured"], row["eligible"])] == []
    drafted = {"EAGLE3"} if case.step == "verify" else set()
    ran = {path for path, row in rows.items() if row["verdict"] == "runs"}
    assert ran == {"index reuse", "index producer skip", "radix hit", *drafted}
    assert rows["index reuse"]["setting"] == f"AGENTSERVE_INDEX_REUSE={case.setting}"
    # No path of a GPU ran, by a count of what did.
    for path in ("MSA kernel", "AITER sparse paged attention"):
        assert rows[path]["executed"] == 0
        assert re.fullmatch(r"of ([\d,]+) passes \(.*: torch \1\)", rows[path]["counter"])
    assert rows["quantized all-reduce"]["executed"] == 0
    modes = server.metric("agentserve_sparse_attention_passes")
    assert {"extend", case.step} <= {labels.split('mode="')[1].split('"')[0] for labels in modes}
    if drafted:
        assert "tokens a step, real acceptance" in rows["EAGLE3"]["counter"]
