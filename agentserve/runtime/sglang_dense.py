"""SGLang's torch attention without its quadratic detour, for M3's dense layers (and EAGLE3's draft) on a CPU.

``TorchNativeAttnBackend`` (sglang 0.5.23) pads the queries of an extend to the whole sequence, so that a turn of
100 new tokens on an 8,000-token cached prefix costs a full 8,000 x 8,000 attention. Here only the new queries
are computed.
"""

from __future__ import annotations

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class DenseTorchAttnBackend(TorchNativeAttnBackend):
    """Dense causal attention on paged KV; only the extend differs from the parent."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if not causal or windowed or encoder_lens is not None:
            result: torch.Tensor = super()._run_sdpa_forward_extend(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
                extend_seq_lens, encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
            return result
        start = 0
        for row, (length, prefix, count) in enumerate(
            zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
        ):
            slots = req_to_token[req_pool_indices[row], :length]
            rows = slice(start, start + count)
            output[rows] = causal_extend(query[rows], k_cache[slots], v_cache[slots], prefix, scaling)
            start += count
        return output


def causal_extend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: int, scale: float | None) -> torch.Tensor:
    """Causal attention of the last ``T`` tokens of a sequence.

    The cached prefix is seen by every query, so it needs no mask; the new tokens are a square causal problem. The
    two halves are merged by their log-sum-exp, which is why the operator below is used: torch's public
    ``scaled_dot_product_attention`` runs it too (CPU, torch 2.13) but does not return the log-sum-exp.

    Args:
        q: ``[T, Hq, D]``; k, v: ``[prefix + T, Hkv, D]``.
        scale: softmax scale, None for ``D ** -0.5``.

    Returns:
        ``[T, Hq, D]``.
    """
    group = q.shape[1] // k.shape[1]
    queries = q.movedim(0, 1).unsqueeze(0)
    keys = k.to(q.dtype).movedim(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
    values = v.to(q.dtype).movedim(0, 1).repeat_interleave(group, dim=0).unsqueeze(0)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    new, new_lse = attend(queries, keys[:, :, prefix:], values[:, :, prefix:], 0.0, True, scale=scale)
    if prefix:
        old, old_lse = attend(queries, keys[:, :, :prefix], values[:, :, :prefix], 0.0, False, scale=scale)
        share = torch.sigmoid(new_lse.float() - old_lse.float()).unsqueeze(-1)
        new = old * (1 - share) + new * share
    merged: torch.Tensor = new.squeeze(0).movedim(1, 0).to(q.dtype)
    return merged
