"""What EAGLE's kernels do for a linear chain of drafts, in torch: slots, tables and greedy verification.

A request of committed length ``L`` verifies ``C`` tokens at once: the last token that is certain, at position ``L``,
and ``C - 1`` drafts after it. Shapes: ``N`` requests, ``C`` tokens a request, ``R`` rows of the slot table.

Same results as SGLang's kernels for ``topk`` 1 (``kernels/ops/speculative``, sglang 0.5.23).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


def chain_slots(table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, count: int) -> torch.Tensor:
    """Cache slots of ``count`` consecutive positions of each request.

    Args:
        table: ``[R, positions]`` slot of every position of every request.
        rows: ``[N]`` the requests' rows.
        starts: ``[N]`` first position.

    Returns:
        int64 ``[N * count]``, request by request.
    """
    positions = starts.long()[:, None] + torch.arange(count, device=table.device)
    return table[rows.long()[:, None], positions].flatten().long()


def ragged_slots(table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As ``chain_slots``, from ``starts`` to before ``ends`` of each request."""
    row, position = _ragged(rows, starts, ends)
    return table[row, position].long()


def write_slots(
    table: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor
) -> None:
    """Enter new slots, request by request, at the positions from ``starts`` to before ``ends``."""
    row, position = _ragged(rows, starts, ends)
    table[row, position] = slots[: len(row)].to(table.dtype)


def _ragged(rows: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    counts = (ends - starts).long()
    row = rows.long().repeat_interleave(counts)
    first = (starts.long() - (counts.cumsum(0) - counts)).repeat_interleave(counts)
    return row, first + torch.arange(len(row), device=rows.device)


class ChainTables(NamedTuple):
    """A chain in the terms of a draft tree, all int64."""

    positions: torch.Tensor  # [N * C] absolute position of each token
    place: torch.Tensor  # [N, C] its place among all tokens of the batch
    next_token: torch.Tensor  # [N, C] its child within the request, -1 after the last
    next_sibling: torch.Tensor  # [N, C] -1: a chain has none


def chain_tables(lengths: torch.Tensor, count: int) -> ChainTables:
    """The tables of a batch; ``lengths`` ``[N]`` are the committed lengths."""
    step = torch.arange(count, device=lengths.device)
    index = torch.arange(len(lengths) * count, device=lengths.device).view(-1, count)
    following = torch.where(step < count - 1, step + 1, -1).expand_as(index)
    return ChainTables(
        (lengths.long()[:, None] + step).flatten(), index, following.clone(), torch.full_like(following, -1)
    )


def accepted_drafts(candidates: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """How many drafts each request may keep.

    Args:
        candidates: ``[N, C]`` the certain token and the drafts after it.
        predicted: ``[N, C]`` what the model says comes after each of them.

    Returns:
        int64 ``[N]``, 0 .. C - 1: drafts before the first one that the model would not have written.
    """
    return (candidates[:, 1:] == predicted[:, :-1]).long().cumprod(dim=1).sum(dim=1)
