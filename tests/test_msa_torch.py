"""The torch sparse attention against a plain dense computation with the chosen blocks as a mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.runtime.msa_torch import (
    BlockRule,
    attend_decode,
    attend_extend,
    choose_blocks,
    select_decode,
    select_extend,
    union_of_groups,
)


def naive_choice(idx_q: torch.Tensor, idx_k: torch.Tensor, first: int, rule: BlockRule) -> list[list[set[int]]]:
    """Chosen blocks by the definition, one query and head at a time: ``[Hi][T]`` sets."""
    chosen = []
    for head in range(idx_q.shape[1]):
        rows = []
        for t in range(idx_q.shape[0]):
            position = first + t
            dots = (idx_k[: position + 1] @ idx_q[t, head]).tolist()
            own = position // rule.block_size
            scores = {b: max(dots[b * rule.block_size : (b + 1) * rule.block_size]) for b in range(own + 1)}
            forced = {b for b in scores if b < rule.init_blocks or b > own - rule.local_blocks}
            ranked = sorted(scores, key=lambda b: (b not in forced, -scores[b]))
            rows.append(set(ranked[: rule.topk]))
        chosen.append(rows)
    return chosen


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: list[list[set[int]]], first: int, size: int
) -> torch.Tensor:
    """Dense attention per query and head, all keys outside the chosen blocks masked."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        for t in range(q.shape[0]):
            blocks = chosen[head // group][t]
            keys = [p for p in range(first + t + 1) if p // size in blocks]
            weights = torch.softmax(k[keys, head // group] @ q[t, head] * q.shape[-1] ** -0.5, dim=0)
            out[t, head] = weights @ v[keys, head // group]
    return out


def as_sets(chosen: torch.Tensor) -> list[list[set[int]]]:
    return [[{b for b in row if b >= 0} for row in head] for head in chosen.tolist()]


shapes = st.fixed_dictionaries(
    {
        "first": st.integers(0, 70),
        "queries": st.integers(1, 40),
        "size": st.sampled_from([1, 4, 8, 16]),
        "topk": st.integers(1, 5),
        "init": st.integers(0, 2),
        "local": st.integers(0, 2),
        "seed": st.integers(0, 2**31),
    }
)


def rule_of(case: dict[str, int]) -> BlockRule:
    topk = max(case["topk"], case["init"] + case["local"])
    return BlockRule(case["size"], topk, case["init"], case["local"])


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_extend_equals_the_definition(case: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    first, count, rule = case["first"], case["queries"], rule_of(case)
    length = first + count
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    idx_q, idx_k = draw(count, 2, 8), draw(length, 8)
    q, k, v = draw(count, 4, 8), draw(length, 2, 8), draw(length, 2, 8)
    chosen = select_extend(idx_q, idx_k, first, rule, 1.0)
    assert as_sets(chosen) == naive_choice(idx_q, idx_k, first, rule)
    out = attend_extend(q, k, v, chosen, first, rule.block_size, 8**-0.5)
    torch.testing.assert_close(out, naive_attention(q, k, v, as_sets(chosen), first, rule.block_size))


@settings(max_examples=60, deadline=None)
@given(shapes)
def test_decode_equals_extend_of_the_last_token(case: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(case["seed"])
    rule, size = rule_of(case), case["size"]
    lengths = [case["first"] + 1, case["queries"]]
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    pool_k, pool_v, pool_i = draw(256, 2, 8), draw(256, 2, 8), draw(256, 1, 8)
    columns = -(-max(lengths) // size) * size
    slots = torch.stack([torch.randperm(256, generator=generator)[:columns] for _ in lengths])
    q, idx_q = draw(2, 4, 8), draw(2, 2, 8)
    seq_lens = torch.tensor(lengths)
    chosen = select_decode(idx_q, pool_i[slots, 0], seq_lens, rule, 1.0)
    out = attend_decode(q, pool_k, pool_v, slots, chosen, seq_lens, size, 8**-0.5)
    for row, length in enumerate(lengths):
        mine = slots[row, :length]
        one = select_extend(idx_q[row : row + 1], pool_i[mine, 0], length - 1, rule, 1.0)
        assert as_sets(one) == as_sets(chosen[:, row : row + 1])
        expected = attend_extend(q[row : row + 1], pool_k[mine], pool_v[mine], one, length - 1, size, 8**-0.5)
        torch.testing.assert_close(out[row : row + 1], expected)


def test_a_long_context_crosses_every_tile_border() -> None:
    generator = torch.Generator().manual_seed(3)
    rule = BlockRule(128, 4, 1, 1)
    first, count = 1500, 700
    idx_q = torch.randn(count, 2, 16, generator=generator)
    idx_k = torch.randn(first + count, 16, generator=generator)
    tiled = select_extend(idx_q, idx_k, first, rule, 1.0)
    whole = torch.einsum("thd,ld->htl", idx_q, idx_k)
    positions = torch.arange(first, first + count)
    whole.masked_fill_(torch.arange(first + count) > positions[:, None], float("-inf"))
    padded = torch.nn.functional.pad(whole, (0, -(first + count) % 128), value=float("-inf"))
    expected = choose_blocks(padded.view(2, count, -1, 128).amax(-1), positions, rule)
    assert (tiled == expected).all(dim=-1).float().mean() > 0.999  # summation order may flip an exact near-tie
    assert (tiled[:, :, 0] == 0).all()  # the init block
    assert (tiled.amax(dim=-1) == positions // 128).all()  # the local block


def test_lse_pools_by_log_sum_exp() -> None:
    rule = BlockRule(2, 1, 0, 0, "lse")
    idx_k = torch.tensor([[1.0], [1.0], [1.5], [-9.0], [0.0], [0.0]])
    assert select_extend(torch.ones(1, 1, 1), idx_k, 5, rule, 1.0).item() == 0  # log(2e) > 1.5
    assert select_extend(torch.ones(1, 1, 1), idx_k, 5, BlockRule(2, 1, 0, 0), 1.0).item() == 1


def test_union_of_index_heads_that_share_a_kv_head() -> None:
    chosen = torch.tensor([[[0, 2, 5]], [[2, 3, -1]], [[1, -1, -1]], [[1, 4, -1]]], dtype=torch.int32)
    union = union_of_groups(chosen, num_kv_heads=2)
    assert union.tolist() == [[[0, 2, 3, 5, -1, -1]], [[1, 4, -1, -1, -1, -1]]]
    assert union_of_groups(chosen, num_kv_heads=4) is chosen


def test_forced_blocks_must_fit_into_the_topk() -> None:
    with pytest.raises(ValueError, match="forced blocks are part of the top-k"):
        BlockRule(128, 2, 2, 1)
    with pytest.raises(ValueError, match="score_type"):
        BlockRule(128, 4, 0, 1, "mean")


@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 37), (100, 1), (100, 37), (1500, 200)])
def test_dense_extend_equals_public_attention(prefix: int, new: int) -> None:
    """The operator underneath is private to torch: this sees a torch that changes it."""
    from agentserve.runtime import torchvision_operators

    torchvision_operators.declare()
    from agentserve.runtime.sglang_dense import causal_extend

    generator = torch.Generator().manual_seed(prefix + new)
    q = torch.randn(new, 4, 16, generator=generator)
    k, v = (torch.randn(prefix + new, 2, 16, generator=generator) for _ in range(2))
    mask = torch.arange(prefix + new) <= torch.arange(prefix, prefix + new)[:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.movedim(0, 1)[None], k.movedim(0, 1)[None], v.movedim(0, 1)[None], attn_mask=mask, enable_gqa=True
    )[0].movedim(1, 0)
    torch.testing.assert_close(causal_extend(q, k, v, prefix, None), expected)
