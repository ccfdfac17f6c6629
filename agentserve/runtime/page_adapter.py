"""The page adapter: chosen 128-token blocks as a compact table of small pages over the same allocation.

M3 chooses logical blocks of 128 tokens; AITER's paged attention reads physical pages of 16. The mismatch is bridged by
metadata alone: each query row gets a table with the pages of its chosen blocks, one after the other, and the kernel
reads them through a view of the existing cache. No key or value moves. (vLLM #47287 for one-token decode, #47984 for
multi-token verification.)

A paged kernel knows nothing of blocks: it walks the table from the left and stops after ``lengths`` keys. So every page
but the last must be full. Only the query's own block can be partly filled, and ascending order puts it last.

All functions are plain torch with static shapes and without host synchronisation, so that a CUDA graph can hold them.
Shapes: ``T`` query rows, ``R`` requests, ``K`` chosen blocks, ``Hkv`` KV heads of this rank, ``P`` pages a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

AITER_PAGE_SIZE = 16


class QueryRows(NamedTuple):
    """Which request and position each flattened query row stands at."""

    request: torch.Tensor  # [T] int64, row of the request in the slot table
    position: torch.Tensor  # [T] int64, absolute; the row attends to 0..position; -1: a padding row


class PageTable(NamedTuple):
    """What a paged attention kernel gets instead of (block ids, sequence length)."""

    pages: torch.Tensor  # [Hkv, T, K * P] int32, physical page ids, used ones first; 0 beyond
    lengths: torch.Tensor  # [Hkv, T] int32, keys in the used pages; only the last page may be partly filled


def query_rows(request: torch.Tensor, cached: torch.Tensor, tokens_per_request: int = 1) -> QueryRows:
    """Rows of a batch in which each request has the same number of new tokens.

    One for decode; ``1 + draft tokens`` for the verification of a linear draft chain, whose row ``i`` sees the draft
    tokens up to ``i``.

    Args:
        request: ``[R]`` integer, each request's row in the slot table (``req_pool_indices``).
        cached: ``[R]`` integer, tokens in the cache before the new ones.
        tokens_per_request: new tokens of each request, in consecutive rows.

    Returns:
        ``T = R * tokens_per_request`` rows.
    """
    step = torch.arange(tokens_per_request, device=cached.device)
    position = cached.long()[:, None] + step
    return QueryRows(request.long().repeat_interleave(tokens_per_request), position.flatten())


def page_view(cache: torch.Tensor, page_size: int = AITER_PAGE_SIZE) -> torch.Tensor:
    """A slot-major pool ``[slots, Hkv, D]`` as ``[slots / page_size, page_size, Hkv, D]``, sharing its memory.

    Raises:
        ValueError: the slots are no whole number of pages.
    """
    if cache.shape[0] % page_size:
        raise ValueError(f"a pool of {cache.shape[0]} slots is no whole number of pages of {page_size}")
    return cache.view(-1, page_size, *cache.shape[1:])


def page_table(
    chosen: torch.Tensor,
    rows: QueryRows,
    slot_table: torch.Tensor,
    *,
    block_size: int = 128,
    page_size: int = AITER_PAGE_SIZE,
) -> PageTable:
    """Turn chosen blocks into a compact page table.

    Args:
        chosen: ``[Hkv, T, K]`` integer, logical block ids in any order. -1, blocks after the row's own and repeats
            are dropped: a repeated block would count its keys twice.
        rows: request and position of each row.
        slot_table: ``[requests, >= longest sequence]`` integer, physical slot of each token position
            (``req_to_token``). The allocator hands out aligned runs of at least ``page_size`` slots.
        block_size: tokens per logical block.
        page_size: tokens per physical page of the kernel.

    Returns:
        Tables for the cache seen through ``page_view(cache, page_size)``.

    Raises:
        ValueError: blocks are no whole number of pages, or shapes do not fit together.
    """
    if block_size % page_size:
        raise ValueError(f"blocks of {block_size} tokens are no whole number of pages of {page_size}")
    if chosen.dim() != 3 or rows.position.shape != chosen.shape[1:2] or rows.request.shape != rows.position.shape:
        raise ValueError(
            f"chosen must be [Hkv, T, K] and rows [T], got {list(chosen.shape)}, request {list(rows.request.shape)} "
            f"and position {list(rows.position.shape)}"
        )
    own = rows.position.div(block_size, rounding_mode="floor")[:, None]  # -1 for padding rows: they keep nothing
    blocks = _distinct_ascending(chosen.long(), own)
    used = blocks >= 0

    reaches_own = (used & (blocks == own)).any(dim=-1)
    inside_own = rows.position % block_size + 1
    lengths = used.sum(dim=-1) * block_size - torch.where(reaches_own, block_size - inside_own, 0)

    per_block = block_size // page_size
    step = torch.arange(per_block, device=chosen.device) * page_size
    first = (blocks[..., None] * block_size + step).flatten(-2)  # position of each page's first token
    # The own block's pages after the row's position hold nothing yet: their slots are whatever was there before.
    filled = used.repeat_interleave(per_block, dim=-1) & (first <= rows.position[:, None])
    slots = slot_table[rows.request[:, None], first.clamp(0, slot_table.shape[1] - 1)]
    pages = torch.where(filled, slots.div(page_size, rounding_mode="floor"), 0)
    return PageTable(pages.to(torch.int32), lengths.to(torch.int32))


def _distinct_ascending(blocks: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Keep ids in 0..last once each, ascending; -1 fills the right."""
    none = torch.iinfo(blocks.dtype).max
    ids = blocks.masked_fill((blocks < 0) | (blocks > last), none).sort(dim=-1).values
    repeat = torch.zeros_like(ids, dtype=torch.bool)
    repeat[..., 1:] = ids[..., 1:] == ids[..., :-1]
    ids = ids.masked_fill(repeat, none).sort(dim=-1).values
    return ids.masked_fill(ids == none, -1)
