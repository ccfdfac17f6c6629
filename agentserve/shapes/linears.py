"""The matrices of M3 as one tensor-parallel rank holds and multiplies them.

A model diagram shows global sizes; a kernel sees what is left after sharding, head replication, padding and fusion.
Sharding follows SGLang 0.5.23 (``srt/models/minimax_m3.py``, ``srt/layers/linear.py``): query heads are split, K/V and
index heads are split and then replicated, the index key is replicated always, experts are cut along their intermediate
size, the vocabulary is padded and split. Expert and data parallelism are not described.

``tests/test_shapes_upstream.py`` builds the real classes on the meta device and compares.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from agentserve.shapes.model import M3Sizes, ShapeError

_VOCAB_PADDING = 64  # srt/layers/vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE

# What M, the rows of the activation, is: tokens of the step, tokens routed to one expert, or sequences that sample.
Rows = Literal["tokens", "routed tokens", "sequences"]


@dataclass(frozen=True, slots=True)
class Linear:
    """One kind of matrix on one rank: ``[M, K] x [K, N]``.

    Attributes:
        name: what it projects.
        part: attention, dense MLP, experts, router or LM head; weights are summed by it.
        layers: ids of the layers that hold it, ascending; empty for the LM head, which belongs to none.
        n: columns of the local matrix, after sharding and replication.
        k: length of the local inner product.
        rows: what M is.
        copies: matrices of this kind a layer holds on the rank (experts).
        active: of those, how many one token meets.
        keeps_precision: stays in 16 bits where the checkpoint is quantized.
    """

    name: str
    part: str
    layers: tuple[int, ...]
    n: int
    k: int
    rows: Rows = "tokens"
    copies: int = 1
    active: int = 1
    keeps_precision: bool = False

    @property
    def count(self) -> int:
        """Matrices on the rank, all layers together."""
        return max(len(self.layers), 1) * self.copies

    def m(self, tokens: int, sequences: int) -> float:
        """Rows of one matrix in a step; for experts the mean over all of them."""
        if self.rows == "sequences":
            return sequences
        return tokens * self.active / self.copies


@dataclass(frozen=True, slots=True)
class Layout:
    """How the checkpoint is split and which matrices are joined.

    Attributes:
        tp: tensor-parallel ranks.
        fused: as on CUDA and ROCm: index projections are appended to qkv, and the shared expert to the routed ones.
        index_sources: layers that choose blocks when others reuse their choice; None: every sparse layer chooses.
            The others have no index projections.
    """

    tp: int = 1
    fused: bool = True
    index_sources: Collection[int] | None = None


@dataclass(frozen=True, slots=True)
class LocalHeads:
    """Heads on one rank."""

    query: int
    kv: int
    index: int


def local_heads(sizes: M3Sizes, tp: int) -> LocalHeads:
    """Heads on each of ``tp`` ranks. Raises ShapeError where they cannot be split or replicated evenly."""
    if tp < 1:
        raise ShapeError(f"tp must be at least 1, got {tp}")
    index = sizes.sparse_attention_config.sparse_num_index_heads
    return LocalHeads(
        split("num_attention_heads", sizes.num_attention_heads, tp),
        split_or_replicate("num_key_value_heads", sizes.num_key_value_heads, tp),
        split_or_replicate("sparse_attention_config.sparse_num_index_heads", index, tp),
    )


def local_linears(sizes: M3Sizes, layout: Layout) -> list[Linear]:
    """Every linear of the model on one rank, in order of execution.

    Raises:
        ShapeError: a size does not split over ``layout.tp`` ranks.
    """
    return [*_attention(sizes, layout), *_mlps(sizes, layout), _lm_head(sizes, layout.tp)]


def indexed_layers(sizes: M3Sizes, layout: Layout) -> tuple[int, ...]:
    """Layers that hold index projections, ascending."""
    if layout.index_sources is None:
        return sizes.sparse_layers
    return tuple(sorted({*layout.index_sources, *sizes.index_value_layers}))


def padded_vocab(sizes: M3Sizes, tp: int) -> int:
    """Rows of the embedding and the LM head, all ranks together."""
    return padded_rows(sizes.vocab_size, tp)


def padded_rows(vocab_size: int, tp: int) -> int:
    """Rows that SGLang makes of a vocabulary, so that the ranks have equal parts."""
    padded = _round_up(vocab_size, _VOCAB_PADDING)
    return padded if padded % tp == 0 else _round_up(vocab_size, _VOCAB_PADDING * tp)


def _attention(sizes: M3Sizes, layout: Layout) -> list[Linear]:
    heads = local_heads(sizes, layout.tp)
    qkv = (heads.query + 2 * heads.kv) * sizes.head_dim
    index_dim = sizes.sparse_attention_config.sparse_index_dim
    everywhere = range(sizes.num_hidden_layers)
    with_value = list(sizes.index_value_layers)
    with_index = [layer for layer in indexed_layers(sizes, layout) if layer not in with_value]
    alone = [layer for layer in everywhere if layer not in with_value and layer not in with_index]
    linears: list[Linear] = []

    def add(name: str, layers: list[int], n: int) -> None:
        if layers:
            linears.append(Linear(name, "attention", tuple(sorted(layers)), n, sizes.hidden_size))

    for tag, layers, extra in (("q/k", with_index, 1), ("q/k/v", with_value, 2)):
        index = (heads.index + extra) * index_dim
        if layout.fused:
            add(f"qkv + index {tag}", layers, qkv + index)
        else:
            add(f"index {tag}", layers, index)
    add("qkv", alone if layout.fused else [*alone, *with_index, *with_value], qkv)
    linears.append(Linear("o", "attention", tuple(everywhere), sizes.hidden_size, heads.query * sizes.head_dim))
    if with_value:
        linears.append(Linear("index o", "attention", tuple(with_value), sizes.hidden_size, heads.index * index_dim))
    return linears


def _mlps(sizes: M3Sizes, layout: Layout) -> list[Linear]:
    hidden, moe = sizes.hidden_size, sizes.moe_layers
    expert = split("intermediate_size", sizes.intermediate_size, layout.tp)
    dense = split("dense_intermediate_size", sizes.dense_intermediate_size, layout.tp)
    joined = sizes.n_shared_experts if layout.fused else 0
    copies, active = sizes.num_local_experts + joined, sizes.num_experts_per_tok + joined
    linears = [
        Linear("router", "router", moe, sizes.num_local_experts, hidden, keeps_precision=True),
        Linear("experts w1/w3", "experts", moe, 2 * expert, hidden, "routed tokens", copies, active),
        Linear("experts w2", "experts", moe, hidden, expert, "routed tokens", copies, active),
    ]
    if sizes.n_shared_experts and not joined:
        shared = expert * sizes.n_shared_experts
        linears.append(Linear("shared expert w1/w3", "experts", moe, 2 * shared, hidden))
        linears.append(Linear("shared expert w2", "experts", moe, hidden, shared))
    others = tuple(layer for layer in range(sizes.num_hidden_layers) if layer not in moe)
    if others:
        linears.append(Linear("dense w1/w3", "dense MLP", others, 2 * dense, hidden))
        linears.append(Linear("dense w2", "dense MLP", others, hidden, dense))
    return linears


def _lm_head(sizes: M3Sizes, tp: int) -> Linear:
    rows = padded_vocab(sizes, tp) // tp
    return Linear("LM head", "LM head", (), rows, sizes.hidden_size, "sequences", keeps_precision=True)


def split(field: str, value: int, tp: int) -> int:
    """A rank's part of a size. Raises ShapeError naming the field."""
    if value % tp:
        raise ShapeError(f"{field}={value} cannot be split over tp={tp} ranks; choose a tp that divides it")
    return value // tp


def split_or_replicate(field: str, heads: int, tp: int) -> int:
    """Heads on a rank: a part of them, or one that other ranks have too. Raises ShapeError naming the field."""
    if max(heads, tp) % min(heads, tp):
        raise ShapeError(
            f"{field}={heads} cannot be split over or replicated on tp={tp} ranks; choose tp so that one divides the "
            f"other"
        )
    return max(1, heads // tp)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
