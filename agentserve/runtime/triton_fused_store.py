"""Norm and RoPE of q and k, and the store of k and v, in one Triton kernel.

Arithmetic and its order are those of SGLang's ``fused_gemma_qknorm_rope`` (csrc/minimax, 0.5.23: one lane holds the
elements l, l + 32, l + 64 and l + 96 of a head), so that results are the same bits; ``eval.bench.index_reuse_kernels``
compares them on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEAD_DIM = 128  # with 64 of them rotated: what SGLang's own kernel is specialised for
_ROWS, _WARPS = 4, 4  # a warp for each head of a token: one element of each quarter a lane


@triton.jit
def _norm_rope_store(  # type: ignore[no-untyped-def]
    qkv, q_out, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache,
    rows, qkv_stride, cache_stride, eps,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, block_rows: tl.constexpr, use_pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    here = (row < rows)[:, None]
    token, head = row // (q_heads + 2 * kv_heads), row % (q_heads + 2 * kv_heads)
    is_q, is_v = (head < q_heads)[:, None], (head >= q_heads + kv_heads)[:, None]
    lane = tl.arange(0, 32)[None, :]
    w0 = tl.where(is_q, tl.load(q_weight + lane), tl.load(k_weight + lane)).to(tl.float32)
    w1 = tl.where(is_q, tl.load(q_weight + lane + 32), tl.load(k_weight + lane + 32)).to(tl.float32)
    w2 = tl.where(is_q, tl.load(q_weight + lane + 64), tl.load(k_weight + lane + 64)).to(tl.float32)
    w3 = tl.where(is_q, tl.load(q_weight + lane + 96), tl.load(k_weight + lane + 96)).to(tl.float32)
    if use_pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.load(positions + token, mask=row < rows, other=0).to(tl.int64)
    slot = tl.load(slots + token, mask=row < rows, other=0).to(tl.int64)
    source = qkv + (token.to(tl.int64) * qkv_stride + head * 128)[:, None] + lane
    r0 = tl.load(source, mask=here, other=0.0)
    r1 = tl.load(source + 32, mask=here, other=0.0)
    r2 = tl.load(source + 64, mask=here, other=0.0)
    r3 = tl.load(source + 96, mask=here, other=0.0)
    x0, x1, x2, x3 = r0.to(tl.float32), r1.to(tl.float32), r2.to(tl.float32), r3.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=1) / 128 + eps)[:, None]
    n0, n1 = x0 * inverse * (1.0 + w0), x1 * inverse * (1.0 + w1)
    n2, n3 = x2 * inverse * (1.0 + w2), x3 * inverse * (1.0 + w3)
    angles = cos_sin + (place * 64)[:, None] + lane
    cos, sin = tl.load(angles), tl.load(angles + 32)
    element = qkv.dtype.element_ty
    o0 = tl.where(is_v, r0, (n0 * cos - n1 * sin).to(element))
    o1 = tl.where(is_v, r1, (n1 * cos + n0 * sin).to(element))
    o2 = tl.where(is_v, r2, n2.to(element))
    o3 = tl.where(is_v, r3, n3.to(element))
    to_q = q_out + ((token.to(tl.int64) * q_heads + head) * 128)[:, None] + lane
    to_k = k_cache + (slot * cache_stride + (head - q_heads) * 128)[:, None] + lane
    to_v = v_cache + (slot * cache_stride + (head - q_heads - kv_heads) * 128)[:, None] + lane
    is_k = here & (is_q == 0) & (is_v == 0)
    tl.store(to_q, o0, mask=here & is_q)
    tl.store(to_q + 32, o1, mask=here & is_q)
    tl.store(to_q + 64, o2, mask=here & is_q)
    tl.store(to_q + 96, o3, mask=here & is_q)
    tl.store(to_k, o0, mask=is_k)
    tl.store(to_k + 32, o1, mask=is_k)
    tl.store(to_k + 64, o2, mask=is_k)
    tl.store(to_k + 96, o3, mask=is_k)
    tl.store(to_v, o0, mask=here & is_v)
    tl.store(to_v + 32, o1, mask=here & is_v)
    tl.store(to_v + 64, o2, mask=here & is_v)
    tl.store(to_v + 96, o3, mask=here & is_v)


def norm_rope_store(
    qkv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    eps: float,
    pdl: bool,
) -> torch.Tensor:
    """Gemma-RMS-norm and rotate q and k, store k and v.

    Args:
        qkv: ``[tokens, (q_heads + 2 * kv_heads) * 128]``, rows contiguous; not changed.
        q_weight: ``[128]``, as stored: 1 is added. ``k_weight`` likewise.
        cos_sin: float32 ``[positions, 64]``: 32 cosines, 32 sines.
        positions: ``[tokens]``, integers.
        slots: ``[tokens]``, where k and v go.
        k_cache: ``[slots, kv_heads, 128]``, of qkv's type. ``v_cache`` likewise.
        eps: of the norm.
        pdl: launched before its predecessor ends (programmatic dependent launch, from Hopper on).

    Returns:
        q, ``[tokens, q_heads * 128]``.
    """
    tokens, kv_heads = qkv.shape[0], k_cache.shape[1]
    heads = qkv.shape[1] // HEAD_DIM
    q = qkv.new_empty(tokens, (heads - 2 * kv_heads) * HEAD_DIM)
    if tokens:
        rows = tokens * heads
        _norm_rope_store[(triton.cdiv(rows, _ROWS),)](
            qkv, q, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache,
            rows, qkv.stride(0), k_cache.stride(0), eps,
            q_heads=heads - 2 * kv_heads, kv_heads=kv_heads, block_rows=_ROWS, use_pdl=pdl, num_warps=_WARPS,
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return q
