"""A chain of drafts in torch, against loops that follow SGLang's kernels token by token."""

from __future__ import annotations

import inspect
import pkgutil
import random

import pytest
import torch

from agentserve.runtime import sglang_eagle3_kernels, speculation_chain, torchvision_operators

torchvision_operators.declare()

from agentserve.runtime import sglang_plugin  # noqa: E402
from tests.test_sglang_hooks import parameters, target_of  # noqa: E402

SEEDS = range(8)


def batch(seed: int) -> tuple[random.Random, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Slot table, rows, committed lengths and tokens a request of a random batch."""
    rng = random.Random(seed)
    requests, tokens = rng.randrange(1, 6), rng.randrange(1, 6)
    table = torch.randperm(10 * 64).view(10, 64).to(torch.int32)
    rows = torch.tensor(rng.sample(range(10), requests))
    lengths = torch.tensor([rng.randrange(1, 64 - tokens) for _ in range(requests)], dtype=torch.int32)
    return rng, table, rows, lengths, tokens


@pytest.mark.parametrize("seed", SEEDS)
def test_slots_are_those_of_the_positions(seed: int) -> None:
    rng, table, rows, lengths, tokens = batch(seed)
    wanted = [int(table[r, n + i]) for r, n in zip(rows, lengths, strict=True) for i in range(tokens)]
    assert speculation_chain.chain_slots(table, rows, lengths, tokens).tolist() == wanted
    out = torch.empty(len(wanted), dtype=torch.int64)
    positions = torch.empty_like(lengths)
    sglang_eagle3_kernels.draft_cache_locs(rows, table, lengths, out, 1, tokens, positions)
    assert out.tolist() == wanted
    assert torch.equal(positions, lengths)

    ends = torch.tensor([n + rng.randrange(tokens + 1) for n in lengths.tolist()])
    ragged = [int(table[r, p]) for r, n, e in zip(rows, lengths, ends, strict=True) for p in range(n, e)]
    assert speculation_chain.ragged_slots(table, rows, lengths, ends).tolist() == ragged


@pytest.mark.parametrize("seed", SEEDS)
def test_new_slots_are_entered_where_they_belong_and_nowhere_else(seed: int) -> None:
    rng, table, rows, lengths, tokens = batch(seed)
    ends = torch.tensor([n + rng.randrange(tokens + 1) for n in lengths.tolist()])
    slots = torch.arange(1000, 1000 + int((ends - lengths).sum()))
    wanted, given = table.clone(), iter(slots.tolist())
    for row, start, end in zip(rows, lengths, ends, strict=True):
        for position in range(start, end):
            wanted[row, position] = next(given)
    sglang_eagle3_kernels.assign_req_to_token(rows, table, lengths, ends, slots, len(rows))
    assert torch.equal(table, wanted)


@pytest.mark.parametrize("seed", range(40))
def test_verification_follows_the_tree_that_was_built(seed: int) -> None:
    """The reference walks the tables as SGLang's greedy kernel does: child, compare, child."""
    rng, _, rows, lengths, tokens = batch(seed)
    n = len(rows)
    fill = [torch.full((n, tokens), -7, dtype=torch.int64) for _ in range(3)]
    positions = torch.empty(n * tokens, dtype=torch.int64)
    unused = torch.empty(0)
    sglang_eagle3_kernels.build_chain(
        unused, unused, lengths, torch.empty(0, dtype=torch.bool), positions, *fill, 1, tokens - 1, tokens, 0
    )
    place, child, sibling = fill
    assert positions.tolist() == [int(length) + i for length in lengths for i in range(tokens)]
    assert bool((sibling == -1).all())

    # Few different tokens, so that drafts are often right, and now and then right again after a wrong one.
    candidates = torch.tensor([[rng.randrange(2) for _ in range(tokens)] for _ in range(n)])
    predicted = torch.tensor([[rng.randrange(2) for _ in range(tokens)] for _ in range(n)])
    predicts = torch.zeros(n * tokens, dtype=torch.int32)
    accepted_at = torch.full((n, tokens), -1, dtype=torch.int32)
    counts = torch.empty(n, dtype=torch.int32)
    sglang_eagle3_kernels.verify_chain(
        predicts, accepted_at, counts, candidates, place, child, sibling, predicted, topk=1
    )
    bonus = torch.empty(n, dtype=torch.int32)
    sglang_eagle3_kernels.fill_bonus_tokens(predicts[accepted_at], counts + 1, bonus, tokens, n)
    for request in range(n):
        at, kept = 0, [0]
        while child[request, at] != -1:
            following = int(child[request, at])
            if candidates[request, following] != predicted[request, at]:
                break
            at = following
            kept.append(at)
        assert int(counts[request]) == len(kept) - 1
        wanted = [request * tokens + i for i in kept] + [-1] * (tokens - len(kept))
        assert accepted_at[request].tolist() == wanted
        written = [int(predicts[request * tokens + i]) for i in kept]
        assert written == [int(predicted[request, i]) for i in kept]
        assert int(bonus[request]) == int(predicted[request, kept[-1]])


def test_verification_on_a_cpu_is_greedy_as_on_sglangs_own_cpu_engine() -> None:
    from sglang.srt.speculative.eagle_utils import _verify_uses_greedy

    for drawn in (True, False):
        asked = {"is_all_greedy": not drawn, "is_hip": False, "is_xpu": False, "use_rejection_sampling": False}
        ours = sglang_eagle3_kernels.verify_greedily(is_cpu=False, **asked)
        assert ours is inspect.unwrap(_verify_uses_greedy)(is_cpu=True, **asked) is True


def test_a_tree_is_refused() -> None:
    rows = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"linear chain.*topk 1, got 4"):
        sglang_eagle3_kernels.draft_cache_locs(rows, torch.zeros(1, 8), rows, torch.empty(8), 4, 2)


def test_every_hook_resolves_and_replacements_have_upstreams_signature() -> None:
    hooks = (*sglang_plugin.eagle3_hooks(), *sglang_plugin.eagle3_cpu_hooks())
    for hook in hooks:
        target = target_of(hook.target)
        assert len(hook.reason) > 20
        if hook.kind == "replace":
            assert parameters(target) == parameters(hook.function), hook.target
    assert {hook.kind for hook in hooks} == {"replace", "around", "after", "before"}


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("sglang.srt.mem_cache.registry.create_tree_cache", ["ctx"]),
        (
            "sglang.srt.managers.scheduler_components.batch_result_processor."
            "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
            ["self", "result", "batch"],
        ),
        (
            "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.__init__",
            ["self", "runner"],
        ),
        ("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_decode_backend", ["self"]),
        ("sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend", ["self"]),
    ],
)
def test_wrapped_functions_take_the_arguments_we_rely_on(target: str, names: list[str]) -> None:
    assert [name for name, _ in parameters(target_of(target))] == names


def test_upstream_still_needs_the_hooks() -> None:
    """A hook whose reason is gone should go too."""
    from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxSparseAttnBackend
    from sglang.srt.mem_cache import kv_cache_builder
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    assert "is_eagle=spec_algorithm.is_eagle()" in inspect.getsource(kv_cache_builder)
    extend = inspect.getsource(MiniMaxSparseAttnBackend.forward_extend)
    assert "if self.is_hip and forward_batch.forward_mode.is_target_verify():" in extend
    # what verify_as_rows switches on is used for nothing else
    uses = inspect.getsource(MiniMaxSparseAttnBackend).split("self.is_hip")[1:]
    assert all("target_verify" in use[:80] or "speculative" in use[:60] or use.startswith(" = ") for use in uses)
    assert "torch_native" not in inspect.getsource(DraftBackendFactory)


def test_sglang_still_reads_the_variables_we_set() -> None:
    from sglang.srt.environ import envs

    from agentserve.runtime import speculation

    for name in (speculation.LENGTH_VARIABLE, speculation.METHOD_VARIABLE, speculation.TOKENS_VARIABLE):
        assert hasattr(envs, name)
    simulated = inspect.getsource(pkgutil.resolve_name("sglang.srt.speculative.spec_utils"))
    environment = speculation.SpeculationSettings(length=2.5).environment()
    for name in (speculation.METHOD_VARIABLE, speculation.TOKENS_VARIABLE):
        assert f'"{environment[name]}"' in simulated


def test_the_capture_layers_of_the_launch_win(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    from agentserve.runtime.sglang_eagle3 import capture_layers
    from agentserve.runtime.speculation import LAYERS_VARIABLE, MODE_VARIABLE

    named = {"eagle_use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": None, "model": "m"}
    upstream = inspect.signature(attention_backend_setup.configure_aux_hidden_state_capture)
    assert set(named) <= set(upstream.parameters)
    monkeypatch.setenv(MODE_VARIABLE, "real")
    monkeypatch.setenv(LAYERS_VARIABLE, "0,2,4")
    assert capture_layers(**named) == ((), {**named, "eagle_aux_hidden_state_layer_ids": [0, 2, 4]})
    # a draft's own runner captures nothing
    assert capture_layers(**{**named, "eagle_use_aux_hidden_state": False}) is None
