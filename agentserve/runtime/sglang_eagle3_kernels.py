"""EAGLE's Triton kernels where none can run: SGLang's functions, answered by ``speculation_chain``.

Each function has the signature of the one it replaces (checked against 0.5.23; a test compares them). Tensors that
SGLang hands over to be filled are filled in place.
"""

from __future__ import annotations

from typing import Any

import torch

from agentserve.runtime.speculation_chain import (
    accepted_drafts,
    chain_slots,
    chain_tables,
    ragged_slots,
    write_slots,
)


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """The platform's ``get_speculative_cache_locs_fn``: slots of the tokens to verify."""
    return ragged_slots(req_to_token, req_pool_indices, start_offset, end_offset)


def draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """REPLACE ``assign_draft_cache_locs_contiguous_func``."""
    _require_chain(topk)
    if mrope is not None:
        raise ValueError("EAGLE3 on a CPU is for text models: multimodal rotary positions are not supported")
    out_cache_loc.copy_(chain_slots(req_to_token, req_pool_indices, seq_lens, num_cols))
    if positions is not None:
        positions.copy_(seq_lens)


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """REPLACE ``assign_req_to_token_pool_func``."""
    write_slots(req_to_token, req_pool_indices, start_offset, end_offset, out_cache_loc)


def build_chain(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: Any,
) -> None:
    """REPLACE ``build_tree_kernel_efficient_func``; the mask stays as it is, since causal attention reads none."""
    _require_chain(topk)
    tables = chain_tables(seq_lens, num_verify_tokens)
    positions.copy_(tables.positions)
    retrieve_index.copy_(tables.place)
    retrieve_next_token.copy_(tables.next_token)
    retrieve_next_sibling.copy_(tables.next_sibling)


def verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """REPLACE ``verify_tree_greedy_func``: greedy verification of a chain.

    Returns:
        ``predicts`` ``[N * C]`` with the model's tokens at the accepted places, ``accept_index`` ``[N, C]`` with these
        places and -1 after them, and ``accept_token_num`` ``[N]`` with the number of accepted drafts.
    """
    _require_chain(topk)
    drafts = accepted_drafts(candidates, target_predict)
    kept = torch.arange(candidates.shape[1], device=candidates.device) <= drafts[:, None]
    accept_token_num.copy_(drafts)
    accept_index.copy_(torch.where(kept, retrieve_index, -1))
    predicts.view_as(target_predict).copy_(torch.where(kept, target_predict.to(predicts.dtype), 0))
    return predicts, accept_index, accept_token_num


def verify_greedily(
    *, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool, use_rejection_sampling: bool
) -> bool:
    """REPLACE ``_verify_uses_greedy``: what it answers for SGLang's own CPU engine, whatever the temperature."""
    return True


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """REPLACE ``fill_bonus_tokens_func``: the last token that each request gained."""
    rows = accept_tokens.view(batch_size, accept_stride)
    bonus_tokens.copy_(rows.gather(1, (accept_lens - 1).long()[:, None]).squeeze(1))


def _require_chain(topk: int) -> None:
    if topk != 1:
        raise ValueError(f"EAGLE3 on a CPU verifies a linear chain: set --speculative-eagle-topk 1, got {topk}")
