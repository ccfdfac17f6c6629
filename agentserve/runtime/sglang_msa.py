"""SGLang's sparse-attention entry points, answered by ``msa_torch`` where no Triton kernel can run.

Same signatures and return values as ``minimax_sparse_prefill`` and ``minimax_sparse_decode`` of
``sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse`` (checked against 0.5.23); a test compares the
signatures, so that an upstream change is seen.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from agentserve.runtime.msa_torch import (
    BlockRule,
    attend_decode,
    attend_extend,
    select_decode,
    select_extend,
    union_of_groups,
)

# Executed, not configured: how often each path ran in this process.
executed: Counter[str] = Counter()


def _require_plain(**unsupported: Any) -> None:
    """Refuse what the torch path does not do, instead of computing something else."""
    given = [name for name, value in unsupported.items() if value is not None and value is not False]
    if given:
        raise ValueError(
            f"the torch sparse attention does not support {', '.join(given)}: MiniMax-M3 publishes no index values "
            "and no attention sinks, and CPU pools hold unscaled bf16 or float32; run on a GPU for the rest"
        )


def prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sink: torch.Tensor | None,
    idx_q: torch.Tensor,
    idx_k_cache: torch.Tensor,
    idx_v_cache: torch.Tensor | None,
    idx_sink: torch.Tensor | None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_size_q: int,
    block_size_k: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    sm_scale: float | None = None,
    idx_sm_scale: float | None = None,
    score_type: str = "max",
    disable_index_value: bool = False,
    use_msa: bool = False,
    cu_seqblocks_q: torch.Tensor | None = None,
    max_seqblock_q: int | None = None,
    all_seqblock_q: int | None = None,
    seqlens_cpu: list[int] | None = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    idx_q_scale: float | None = None,
    idx_k_scale: float | None = None,
    idx_v_scale: float | None = None,
    cached_topk_idx: torch.Tensor | None = None,
    return_topk_idx: bool = False,
    loc_mapping: torch.Tensor | None = None,
    page_size: int = 1,
    seq_lens_cpu: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Sparse prefill of a batch of sequences; see the upstream function for the arguments.

    Returns:
        ``(None, o)`` with o ``[T, Hq, D]``, or ``(None, o, chosen)`` with chosen int32 ``[Hkv, T, K]``.
    """
    _require_plain(
        sink=sink, idx_sink=idx_sink, index_values=not disable_index_value, loc_mapping=loc_mapping, use_msa=use_msa,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        idx_q_scale=idx_q_scale, idx_k_scale=idx_k_scale, idx_v_scale=idx_v_scale,
    )  # fmt: skip
    rule = BlockRule(block_size_k, topk, init_blocks, local_blocks, score_type)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    idx_scale = idx_q.shape[-1] ** -0.5 if idx_sm_scale is None else idx_sm_scale
    num_kv_heads = k_cache.shape[1]
    out = torch.empty_like(q)
    chosen_parts = []
    bounds, lengths, prefixes = cu_seqlens.tolist(), seq_lens.tolist(), prefix_lens.tolist()
    for row, length in enumerate(lengths):
        start, stop = bounds[row], bounds[row + 1]
        if start == stop:
            continue
        slots = req_to_token[slot_ids[row], :length].long()
        if cached_topk_idx is not None:
            chosen = cached_topk_idx[:, start:stop]
        else:
            executed["select_prefill"] += 1
            chosen = select_extend(idx_q[start:stop], idx_k_cache[slots, 0], prefixes[row], rule, idx_scale)
            chosen = union_of_groups(chosen, num_kv_heads)
        executed["attend_prefill"] += 1
        out[start:stop] = attend_extend(
            q[start:stop], k_cache[slots], v_cache[slots], chosen, prefixes[row], block_size_k, scale
        )
        chosen_parts.append(chosen)
    if not return_topk_idx:
        return None, out
    return None, out, torch.cat(chosen_parts, dim=1)


def decode(
    q: torch.Tensor,
    sink: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    idx_q: torch.Tensor,
    idx_sink: torch.Tensor | None,
    idx_k_cache: torch.Tensor,
    idx_v_cache: torch.Tensor | None,
    req_to_token: torch.Tensor,
    slot_ids: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seqlen: int,
    block_size_q: int,
    block_size_k: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    sm_scale: float | None = None,
    idx_sm_scale: float | None = None,
    score_type: str = "max",
    disable_index_value: bool = False,
    dense_main_attn_fn: Any = None,
    page_size: int = 1,
    use_msa: bool = False,
    msa_kv_indices: torch.Tensor | None = None,
    msa_plan: Any = None,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    idx_q_scale: float | None = None,
    idx_k_scale: float | None = None,
    idx_v_scale: float | None = None,
    cached_topk_idx: torch.Tensor | None = None,
    topk_out: torch.Tensor | None = None,
    hisparse_swap_in_fn: Any = None,
    indexer_cp: Any = None,
    packed_queries: int = 1,
) -> tuple[None, torch.Tensor]:
    """Sparse decode, one query a row; see the upstream function for the arguments.

    Returns:
        ``(None, o)`` with o ``[N, Hq, D]``.
    """
    _require_plain(
        sink=sink, idx_sink=idx_sink, index_values=not disable_index_value, dense_main_attn_fn=dense_main_attn_fn,
        use_msa=use_msa, hisparse_swap_in_fn=hisparse_swap_in_fn,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        idx_q_scale=idx_q_scale, idx_k_scale=idx_k_scale, idx_v_scale=idx_v_scale,
    )  # fmt: skip
    rule = BlockRule(block_size_k, topk, init_blocks, local_blocks, score_type)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
    idx_scale = idx_q.shape[-1] ** -0.5 if idx_sm_scale is None else idx_sm_scale
    blocks = -(-int(seq_lens.max()) // block_size_k)
    # The table can be narrower than a whole number of blocks; what lies beyond a sequence is masked, so any slot does.
    columns = torch.arange(blocks * block_size_k, device=q.device).clamp(max=req_to_token.shape[1] - 1)
    slots = req_to_token[slot_ids.long()[:, None], columns].clamp(0, k_cache.shape[0] - 1).long()
    if cached_topk_idx is not None:
        chosen = cached_topk_idx
    else:
        executed["select_decode"] += 1
        if page_size == block_size_k:  # whole pages: one copy a block instead of one a token
            pages = slots[:, ::page_size] // page_size
            keys = idx_k_cache.view(-1, page_size, idx_k_cache.shape[-1])[pages].flatten(1, 2)
        else:
            keys = idx_k_cache[slots, 0]
        chosen = select_decode(idx_q, keys, seq_lens, rule, idx_scale)
        chosen = union_of_groups(chosen, k_cache.shape[1])
    if topk_out is not None:
        topk_out.copy_(chosen)
    executed["attend_decode"] += 1
    return None, attend_decode(q, k_cache, v_cache, slots, chosen, seq_lens, block_size_k, scale)
