"""MiniMax Sparse Attention in torch: choose key blocks with the indexer, then attend to the chosen blocks only.

Per query and per index head, every key block gets the maximum of the indexer's dot products over its causal keys.
The query keeps the ``topk`` best blocks, the first ``init_blocks`` and last ``local_blocks`` (its own block
included) always among them. Main attention then reads nothing but the chosen blocks, so its cost per query is
constant once the context exceeds ``topk * block_size`` tokens; what still grows with the context is the indexer's
scoring, one small dot product a key.

Same contract as SGLang's Triton kernels (``srt/layers/attention/minimax_sparse_ops``, sglang 0.5.23) and
transformers' ``MiniMaxM3VLIndexer`` (5.19). Shapes: ``T`` queries, ``L`` keys, ``Hq``/``Hkv``/``Hi`` query, KV and
index heads, ``D`` head size, ``B`` block size, ``K`` chosen blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Indexer scores are made in tiles of this many queries by keys (2 MiB), which stay in the processor's cache until
# they are reduced to one number a block: six times as fast as whole rows of 8,192 keys.
_QUERY_TILE = 512
_KEY_TILE = 1024


@dataclass(frozen=True, slots=True)
class BlockRule:
    """How a query chooses key blocks."""

    block_size: int
    topk: int
    init_blocks: int
    local_blocks: int
    score_type: str = "max"

    def __post_init__(self) -> None:
        if self.init_blocks + self.local_blocks > self.topk:
            raise ValueError(
                f"init_blocks + local_blocks ({self.init_blocks} + {self.local_blocks}) exceed topk {self.topk}: "
                "forced blocks are part of the top-k"
            )
        if self.score_type not in ("max", "lse"):
            raise ValueError(f"score_type must be 'max' or 'lse', got {self.score_type!r}")


def choose_blocks(scores: torch.Tensor, positions: torch.Tensor, rule: BlockRule) -> torch.Tensor:
    """Pick the top-k blocks of each query.

    Args:
        scores: ``[..., T, NB]`` block scores; those of blocks after the query's own are ignored.
        positions: ``[T]`` or ``[..., T]`` absolute position of each query.
        rule: the selection rule.

    Returns:
        int32 ``[..., T, topk]``, chosen block ids ascending, padded with -1 on the right.
    """
    num_blocks = scores.shape[-1]
    block = torch.arange(num_blocks, device=scores.device)
    own = (positions // rule.block_size).unsqueeze(-1)
    causal = block <= own
    forced = causal & ((block < rule.init_blocks) | (block > own - rule.local_blocks))
    ranked = scores.masked_fill(~causal, float("-inf")).masked_fill(forced, float("inf"))
    kept = min(rule.topk, num_blocks)
    best, ids = ranked.topk(kept, dim=-1)
    # A causal block whose score is -inf does not exist: block 0 up to the query's own all hold a causal key.
    ids = ids.masked_fill(best == float("-inf"), num_blocks).sort(dim=-1).values
    ids = ids.masked_fill(ids == num_blocks, -1).to(torch.int32)
    return torch.nn.functional.pad(ids, (0, rule.topk - kept), value=-1)


def _pool(scores: torch.Tensor, score_type: str) -> torch.Tensor:
    return scores.amax(dim=-1) if score_type == "max" else scores.logsumexp(dim=-1)


def select_extend(
    idx_q: torch.Tensor, idx_k: torch.Tensor, first_position: int, rule: BlockRule, scale: float
) -> torch.Tensor:
    """Choose blocks for consecutive queries of one sequence (prefill, chunked prefill, cached prefix).

    Args:
        idx_q: ``[T, Hi, D]`` index queries at positions ``first_position ..``.
        idx_k: ``[L, D]`` index keys of the whole sequence, ``L == first_position + T``.
        first_position: number of tokens already cached before the first query.
        scale: softmax scale; matters for score_type "lse" only.

    Returns:
        int32 ``[Hi, T, topk]``.
    """
    num_queries, num_heads, _ = idx_q.shape
    size = rule.block_size
    key_tile = max(_KEY_TILE // size, 1) * size
    queries = idx_q.float().transpose(0, 1) * scale
    keys = idx_k.float().T.contiguous()
    chosen = torch.empty(num_heads, num_queries, rule.topk, dtype=torch.int32, device=idx_q.device)
    for start in range(0, num_queries, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, num_queries)
        positions = torch.arange(first_position + start, first_position + stop, device=idx_q.device)
        seen = first_position + stop  # later keys are not causal for any query of this tile
        pooled = queries.new_empty(num_heads, stop - start, -(-seen // size))
        for low in range(0, seen, key_tile):
            high = min(low + key_tile, seen)
            blocks = slice(low // size, -(-high // size))
            ragged = -high % size
            future = None
            if high - 1 > first_position + start:  # some key of this tile comes after some query
                future = torch.arange(low, high, device=idx_q.device) > positions[:, None]
            for head in range(num_heads):
                scores = queries[head, start:stop] @ keys[:, low:high]
                if future is not None:
                    scores.masked_fill_(future, float("-inf"))
                if ragged:
                    scores = torch.nn.functional.pad(scores, (0, ragged), value=float("-inf"))
                pooled[head, :, blocks] = _pool(scores.view(stop - start, -1, size), rule.score_type)
        chosen[:, start:stop] = choose_blocks(pooled, positions, rule)
    return chosen


def select_decode(
    idx_q: torch.Tensor, idx_k: torch.Tensor, seq_lens: torch.Tensor, rule: BlockRule, scale: float
) -> torch.Tensor:
    """Choose blocks for one query per row (decode; multi-token verification with a row per draft position).

    Args:
        idx_q: ``[N, Hi, D]`` index queries, row n at position ``seq_lens[n] - 1``.
        idx_k: ``[N, L, D]`` index keys, L a multiple of the block size; keys from ``seq_lens[n]`` on are ignored.
        seq_lens: ``[N]``.

    Returns:
        int32 ``[Hi, N, topk]``.
    """
    length = idx_k.shape[1]
    scores = torch.einsum("nhd,nld->hnl", idx_q.float() * scale, idx_k.float())
    beyond = torch.arange(length, device=idx_q.device) >= seq_lens[:, None]
    scores.masked_fill_(beyond, float("-inf"))
    pooled = _pool(scores.view(*scores.shape[:-1], -1, rule.block_size), rule.score_type)
    return choose_blocks(pooled, seq_lens - 1, rule)


def union_of_groups(chosen: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """One block set per KV head, where several index heads serve one KV head: their union.

    Args:
        chosen: int32 ``[Hi, T, K]``; index heads of a KV head are adjacent.

    Returns:
        int32 ``[Hkv, T, Hi / Hkv * K]``, ascending, without repeats, padded with -1 on the right. Returned
        unchanged when there is one index head a KV head.
    """
    group = chosen.shape[0] // num_kv_heads
    if group == 1:
        return chosen
    merged = chosen.view(num_kv_heads, group, *chosen.shape[1:]).movedim(1, 2).flatten(-2)
    none = torch.iinfo(merged.dtype).max
    merged = merged.masked_fill(merged < 0, none).sort(dim=-1).values
    repeat = torch.zeros_like(merged, dtype=torch.bool)
    repeat[..., 1:] = merged[..., 1:] == merged[..., :-1]
    merged = merged.masked_fill(repeat, none).sort(dim=-1).values
    return merged.masked_fill(merged == none, -1)


def attend_extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chosen: torch.Tensor,
    first_position: int,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Attention of consecutive queries of one sequence over their chosen blocks.

    Works through the key blocks: each block meets, in one matrix product, all the queries that chose it; a query's
    partial results are merged by their softmax maxima at the end. Nothing of size T x L is built and no key is
    copied per query.

    Args:
        q: ``[T, Hq, D]``; k, v: ``[L, Hkv, D]`` of the whole sequence.
        chosen: int32 ``[Hkv, T, K]`` distinct block ids, -1 for none. Every query has at least one block.

    Returns:
        ``[T, Hq, D]`` in q's dtype.
    """
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    per_query = chosen.shape[-1]
    out = torch.empty_like(q)
    for head in range(num_kv_heads):
        queries = q[:, head * group : (head + 1) * group].float() * scale
        keys, values = k[:, head].float(), v[:, head].float()
        pairs = chosen[head].reshape(-1).long()  # pair p: query p // K with block pairs[p]
        order = torch.argsort(pairs, stable=True)
        counts = torch.bincount(pairs + 1, minlength=1).tolist()  # counts[0]: the -1 padding
        partial = queries.new_zeros(num_queries * per_query, group, head_dim)
        peak = queries.new_full((num_queries * per_query, group), float("-inf"))
        mass = queries.new_zeros(num_queries * per_query, group)
        start = counts[0]
        for block, count in enumerate(counts[1:]):
            if count == 0:
                continue
            pair = order[start : start + count]
            start += count
            query = pair // per_query
            low, high = block * block_size, min((block + 1) * block_size, length)
            scores = queries[query] @ keys[low:high].T  # [count, group, keys]
            positions = query + first_position
            if high - 1 > first_position:  # some query may stand inside this block
                future = torch.arange(low, high, device=q.device) > positions[:, None]
                scores = scores.masked_fill(future[:, None, :], float("-inf"))
            top = scores.amax(dim=-1)
            weights = torch.exp(scores - top[..., None])
            peak[pair] = top
            mass[pair] = weights.sum(dim=-1)
            partial[pair] = weights @ values[low:high]
        peak = peak.view(num_queries, per_query, group)
        correction = torch.exp(peak - peak.amax(dim=1, keepdim=True))
        total = (mass.view(num_queries, per_query, group) * correction).sum(dim=1)
        merged = (partial.view(num_queries, per_query, group, head_dim) * correction[..., None]).sum(dim=1)
        out[:, head * group : (head + 1) * group] = (merged / total[..., None]).to(q.dtype)
    return out


def attend_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    chosen: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    scale: float,
) -> torch.Tensor:
    """Attention of one query per row over its chosen blocks, gathered from the paged cache.

    Args:
        q: ``[N, Hq, D]``; k_cache, v_cache: ``[S, Hkv, D]`` slot-major pools.
        slots: ``[N, L]`` cache slot of every token position of the row's sequence.
        chosen: int32 ``[Hkv, N, K]``, -1 for none.
        seq_lens: ``[N]``; row n attends to positions below ``seq_lens[n]``.

    Returns:
        ``[N, Hq, D]`` in q's dtype.
    """
    rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    offsets = torch.arange(block_size, device=q.device)
    positions = (chosen.long()[..., None] * block_size + offsets).flatten(-2)  # [Hkv, N, K * B]
    valid = (positions >= 0) & (positions < seq_lens[None, :, None])
    positions = positions.clamp(0, slots.shape[1] - 1)
    where = torch.gather(slots.expand(num_kv_heads, -1, -1), 2, positions).long()
    head = torch.arange(num_kv_heads, device=q.device)[:, None, None]
    keys, values = k_cache[where, head].float(), v_cache[where, head].float()  # [Hkv, N, K * B, D]
    queries = q.float().view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim).transpose(0, 1)
    scores = (queries @ keys.transpose(-1, -2)) * scale
    weights = scores.masked_fill(~valid[:, :, None, :], float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1).reshape(rows, num_heads, head_dim).to(q.dtype)
