"""Reading small pages through the adapter's tables against gathering the chosen blocks' keys by position."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentserve.runtime.msa_torch import attend_decode
from agentserve.runtime.page_adapter import PageTable, QueryRows, page_table, page_view, query_rows
from tests.conftest import REPOSITORY

BLOCK, PAGE, DIM = 128, 16, 8


@dataclass(frozen=True)
class Batch:
    """A random paged cache and a batch of query rows over it."""

    k: torch.Tensor  # [slots, Hkv, D]
    v: torch.Tensor
    slot_table: torch.Tensor  # [requests, longest]
    rows: QueryRows
    q: torch.Tensor  # [T, Hq, D]
    chosen: torch.Tensor  # [Hkv, T, K]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Pages are permuted over the pool, requests over the slot table; block ids may repeat, be -1 or in the future."""
    seed = draw(st.integers(0, 2**32 - 1))
    new_tokens = draw(st.sampled_from([1, 1, 2, 4, 6]))
    cached = draw(st.lists(st.integers(0, 700), min_size=1, max_size=4))
    kv_heads = draw(st.sampled_from([1, 1, 2]))
    topk = draw(st.integers(1, 8))
    # The allocator's own pages: SGLang's 128, or anything down to the kernel's.
    granule = draw(st.sampled_from([128, 64, 16]))
    random = torch.Generator().manual_seed(seed)

    longest = -(-(max(cached) + new_tokens) // BLOCK) * BLOCK
    pages_each = longest // granule
    table_rows = len(cached) + 2
    spare = 3
    physical = torch.randperm(table_rows * pages_each + spare, generator=random)[: table_rows * pages_each]
    slots = physical[:, None] * granule + torch.arange(granule)
    slot_table = slots.reshape(table_rows, longest).to(torch.int32)
    request = torch.randperm(table_rows, generator=random)[: len(cached)]
    total = (table_rows * pages_each + spare) * granule

    lengths = torch.tensor(cached)
    rows = query_rows(request, lengths, new_tokens)
    for r, length in zip(request.tolist(), cached, strict=True):
        slot_table[r, length + new_tokens :] = 0  # beyond the end the table holds leftovers
    t = len(rows.position)
    k, v = torch.randn(2, total, kv_heads, DIM, generator=random)
    q = torch.randn(t, kv_heads * 2, DIM, generator=random)
    # Anything from -1 to one block past the longest sequence, so that every kind of id occurs.
    chosen = torch.randint(-1, longest // BLOCK + 1, (kv_heads, t, topk), generator=random)
    own = rows.position // BLOCK
    keeps_own = torch.rand(kv_heads, t, generator=random) < 0.7
    chosen[..., 0] = torch.where(keeps_own, own, chosen[..., 0])
    return Batch(k, v, slot_table, rows, q, chosen.to(torch.int32))


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query head over ``[n, D]`` keys; zero where there are none."""
    if not len(keys):
        return torch.zeros_like(q)
    return torch.softmax(keys @ q * DIM**-0.5, dim=0) @ values


def through_pages(batch: Batch, table: PageTable) -> torch.Tensor:
    """What a paged kernel does: walk the row's pages from the left, stop after its length."""
    k_pages, v_pages = page_view(batch.k, PAGE), page_view(batch.v, PAGE)
    out = torch.empty_like(batch.q)
    group = batch.q.shape[1] // batch.k.shape[1]
    for row in range(batch.q.shape[0]):
        for head in range(batch.q.shape[1]):
            kv = head // group
            length = int(table.lengths[kv, row])
            pages = table.pages[kv, row, : -(-length // PAGE)].long()
            keys = k_pages[pages, :, kv].reshape(-1, DIM)[:length]
            values = v_pages[pages, :, kv].reshape(-1, DIM)[:length]
            out[row, head] = attend(batch.q[row, head], keys, values)
    return out


def by_position(batch: Batch) -> torch.Tensor:
    """The definition: all token positions up to the row's own that lie in one of its blocks, each once."""
    out = torch.empty_like(batch.q)
    group = batch.q.shape[1] // batch.k.shape[1]
    for row in range(batch.q.shape[0]):
        request, position = int(batch.rows.request[row]), int(batch.rows.position[row])
        for head in range(batch.q.shape[1]):
            kv = head // group
            blocks = set(batch.chosen[kv, row].tolist())
            seen = [p for p in range(position + 1) if p // BLOCK in blocks]
            slots = batch.slot_table[request, seen].long()
            out[row, head] = attend(batch.q[row, head], batch.k[slots, kv], batch.v[slots, kv])
    return out


@given(batches())
def test_attention_through_pages_equals_a_gather_of_the_blocks(batch: Batch) -> None:
    table = page_table(batch.chosen, batch.rows, batch.slot_table)
    torch.testing.assert_close(through_pages(batch, table), by_position(batch), atol=1e-5, rtol=1e-5)


@given(batches())
def test_tables_are_compact_and_leave_the_cache_alone(batch: Batch) -> None:
    k_before = batch.k.clone()
    table = page_table(batch.chosen, batch.rows, batch.slot_table)
    assert table.pages.shape == (*batch.chosen.shape[:2], batch.chosen.shape[2] * BLOCK // PAGE)
    assert table.pages.dtype == table.lengths.dtype == torch.int32
    for pages, length in zip(table.pages.flatten(0, 1).tolist(), table.lengths.flatten().tolist(), strict=True):
        used = -(-length // PAGE)
        assert len(set(pages[:used])) == used
        assert not any(pages[used:])
    assert torch.equal(batch.k, k_before)
    view = page_view(batch.k)
    assert view.untyped_storage().data_ptr() == batch.k.untyped_storage().data_ptr()


def test_a_row_of_verification_sees_the_draft_up_to_itself_only() -> None:
    """Three draft rows that cross from a full block into the next."""
    rows = query_rows(torch.tensor([0]), torch.tensor([126]), 4)
    assert rows.position.tolist() == [126, 127, 128, 129]
    slot_table = torch.arange(256)[None]
    table = page_table(torch.tensor([[[1, 0]] * 4]), rows, slot_table)
    assert table.lengths.tolist() == [[127, 128, 129, 130]]
    assert table.pages[0, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7] + [0] * 8
    assert table.pages[0, 2].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] + [0] * 7


def test_requests_interleave_as_flattened_rows() -> None:
    rows = query_rows(torch.tensor([5, 2]), torch.tensor([10, 300]), 3)
    assert rows.request.tolist() == [5, 5, 5, 2, 2, 2]
    assert rows.position.tolist() == [10, 11, 12, 300, 301, 302]


def test_padding_rows_read_nothing() -> None:
    rows = QueryRows(torch.tensor([0, 0]), torch.tensor([-1, 5]))
    table = page_table(torch.tensor([[[0, 1], [0, -1]]]), rows, torch.arange(128, 256)[None])
    assert table.lengths.tolist() == [[0, 6]]
    assert table.pages[0, 0].tolist() == [0] * 16
    assert table.pages[0, 1].tolist() == [8] + [0] * 15


@given(batches())
def test_equals_the_attention_that_serves_on_a_cpu(batch: Batch) -> None:
    """``attend_decode`` gathers whole blocks: distinct ids, the own block always among them, as M3 chooses."""
    own = (batch.rows.position // BLOCK).to(torch.int32)
    chosen = torch.stack([own, (own - 2).clamp(min=-1)], dim=-1).expand(batch.k.shape[1], -1, -1)
    table = page_table(chosen, batch.rows, batch.slot_table)
    expected = attend_decode(
        batch.q,
        batch.k,
        batch.v,
        batch.slot_table[batch.rows.request],
        chosen,
        batch.rows.position + 1,
        BLOCK,
        DIM**-0.5,
    )
    torch.testing.assert_close(through_pages(batch, table), expected, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    rows = query_rows(torch.tensor([0]), torch.tensor([3]))
    slots = torch.arange(128)[None]
    with pytest.raises(ValueError, match="128 tokens are no whole number of pages of 48"):
        page_table(torch.zeros(1, 1, 2, dtype=torch.int32), rows, slots, page_size=48)
    with pytest.raises(ValueError, match=r"got \[1, 2, 2\]"):
        page_table(torch.zeros(1, 2, 2, dtype=torch.int32), rows, slots)
    with pytest.raises(ValueError, match="100 slots"):
        page_view(torch.zeros(100, 1, 8))


def ascending(own: int, random: torch.Generator) -> torch.Tensor:
    """Three of the blocks up to ``own``, ascending, padded with -1: as M3's selection comes."""
    blocks = torch.randperm(own + 1, generator=random)[:3].sort().values
    return torch.nn.functional.pad(blocks, (0, 3 - len(blocks)), value=-1)


def test_equals_the_table_that_sglang_gives_to_aiter(tmp_path: Path) -> None:
    """Upstream's builder, for prefill: 64-token pages of a scratch copy in which each request lies contiguous."""
    random = torch.Generator().manual_seed(0)
    cases, ours = [], []
    for cached, new_tokens in (([0, 500, 90], 5), ([127, 128], 1), ([1000], 40)):
        rows = query_rows(torch.arange(len(cached)), torch.tensor(cached), new_tokens)
        chosen = torch.stack([ascending(position // BLOCK, random) for position in rows.position.tolist()])[None].int()
        longest = -(-(max(cached) + new_tokens) // BLOCK) * BLOCK
        starts = torch.arange(len(cached)) * longest
        where = {"req_id": rows.request.int(), "abs_pos": rows.position.int(), "page_start": (starts // 64).int()}
        cases.append({"topk_idx": chosen, **where})
        ours.append(page_table(chosen, rows, starts[:, None] + torch.arange(longest), page_size=64))
    torch.save(cases, tmp_path / "cases.pt")
    subprocess.run(
        [sys.executable, "-m", "tests.upstream_page_table", tmp_path / "cases.pt", tmp_path / "tables.pt"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=REPOSITORY,
        check=True,
    )
    for (pages, lengths), table in zip(torch.load(tmp_path / "tables.pt"), ours, strict=True):
        assert lengths.tolist() == table.lengths[0].tolist()
        for theirs, row, length in zip(pages.tolist(), table.pages[0].tolist(), lengths.tolist(), strict=True):
            assert theirs[: -(-length // 64)] == row[: -(-length // 64)]


def test_sglang_still_has_no_place_where_aiter_reads_the_pool() -> None:
    """Why the adapter is not called in serving; when this fails, AITER may decode now (docs/design/shapes.md)."""
    import inspect
    import pkgutil

    from agentserve.runtime import torchvision_operators

    torchvision_operators.declare()
    attention = "sglang.srt.layers.attention"

    def source(path: str) -> str:
        return inspect.getsource(inspect.unwrap(pkgutil.resolve_name(path)))

    sparse = f"{attention}.minimax_sparse_ops.minimax_sparse"
    assert "gluon_sparse_prefill(" in source(f"{sparse}:minimax_sparse_prefill")
    decode = source(f"{sparse}:minimax_sparse_decode").lower()
    assert not any(name in decode for name in ("aiter", "gluon", "pa_decode"))
    backend = f"{attention}.minimax_sparse_backend:MiniMaxSparseAttnBackend"
    # A verification on ROCm is such a decode, of one row a token.
    assert "return self.forward_decode(" in source(f"{backend}.forward_extend").partition("disable_value")[0]
    paged = source(f"{backend}._dense_sparse_main_decode")
    assert paged.count("isinstance(self.dense_backend") == 1
    assert "TRTLLMHAAttnBackend" in paged
    assert "raise NotImplementedError" in paged
    # And the kernel reads pages of another layout, which prefill copies the context to.
    gluon = "sglang.kernels.ops.attention.minimax_sparse.prefill.gluon_prefill"
    called = source(f"{gluon}:gluon_sparse_prefill")
    assert called.index("_gather_context_to_shuffle(") < called.index("pa_decode_gluon(")
