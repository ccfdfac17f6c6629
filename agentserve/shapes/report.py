"""All answers about one split of one checkpoint, as plain data: what ``agentserve shapes`` prints."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agentserve.shapes.budget import Communication, capacity_tokens, communication, weight_bytes
from agentserve.shapes.draft import draft_weight_bytes, read_draft_sizes
from agentserve.shapes.linears import Layout, Linear, LocalHeads, local_heads, local_linears
from agentserve.shapes.model import M3Sizes, read_sizes
from agentserve.shapes.quick_reduce import CODECS, min_message_bytes
from offload.state import Plane, bytes_per_token, dtype_bytes, prefix_state_planes


@dataclass(frozen=True, slots=True)
class Setup:
    """What a server would be started with.

    Attributes:
        tp: tensor-parallel ranks.
        fused: whether the platform joins index projections to qkv and the shared expert to the routed (CUDA, ROCm).
        activation: element type of activations, and so of messages.
        weights: element types of the weights to compare.
        caches: element types of (K/V, index K) to compare.
        index_sources: layers that choose blocks in this setup; None: all sparse layers.
        compared_sources: sources to compare memory with; those of this setup, or of one that it could have.
        page_size: tokens per page.
        draft_config: config of an EAGLE3 draft, whose weights are held and whose K/V are cached too.
        memory_bytes: memory of one device that SGLang may give to weights and cache; None: capacity is not asked.
    """

    tp: int
    fused: bool
    activation: str
    weights: tuple[str, ...]
    caches: tuple[tuple[str, str], ...]
    index_sources: Collection[int] | None
    compared_sources: Collection[int]
    page_size: int = 128
    draft_config: Mapping[str, Any] | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """Cached bytes per token on one rank, for one choice of element types.

    Attributes:
        planes: every sparse layer with index keys, as SGLang by itself allocates.
        reuse_planes: index keys in the compared sources only.
        tokens: weight type -> tokens that fit beside weights of that type; empty where capacity is not asked.
        reuse_tokens: the same with index reuse.
    """

    kv_dtype: str
    index_dtype: str
    planes: tuple[Plane, ...]
    reuse_planes: tuple[Plane, ...]
    tokens: Mapping[str, int]
    reuse_tokens: Mapping[str, int]

    @property
    def total(self) -> int:
        return bytes_per_token(self.planes)

    @property
    def reuse_total(self) -> int:
        return bytes_per_token(self.reuse_planes)

    @property
    def reuse_gain(self) -> float:
        """Tokens that fit into the same bytes with index reuse, over those without."""
        return self.total / self.reuse_total


@dataclass(frozen=True, slots=True)
class ShapeReport:
    """Everything about one rank."""

    tp: int
    heads: LocalHeads
    linears: tuple[Linear, ...]
    weights: Mapping[str, Mapping[str, int]]  # weight type -> part -> bytes
    caches: tuple[Cache, ...]
    communication: Communication
    quick_reduce_tokens: Mapping[str, int]  # codec -> tokens of a step from which it takes the all-reduce

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes are per rank."""
        return {
            "tp": self.tp,
            "heads": {"query": self.heads.query, "kv": self.heads.kv, "index": self.heads.index},
            "linears": [
                {
                    "name": linear.name,
                    "part": linear.part,
                    "layers": list(linear.layers),
                    "m": linear.rows,
                    "n": linear.n,
                    "k": linear.k,
                    "copies": linear.copies,
                    "active": linear.active,
                }
                for linear in self.linears
            ],
            "weight_bytes": {dtype: {**parts, "all": sum(parts.values())} for dtype, parts in self.weights.items()},
            "cache_bytes_per_token": [
                {
                    "kv_dtype": cache.kv_dtype,
                    "index_dtype": cache.index_dtype,
                    "planes": {plane.name: plane.bytes_per_token for plane in cache.planes},
                    "all": cache.total,
                    "planes_with_index_reuse": {plane.name: plane.bytes_per_token for plane in cache.reuse_planes},
                    "all_with_index_reuse": cache.reuse_total,
                    "index_reuse_gain": cache.reuse_gain,
                    "capacity_tokens": dict(cache.tokens),
                    "capacity_tokens_with_index_reuse": dict(cache.reuse_tokens),
                }
                for cache in self.caches
            ],
            "communication": {
                "all_reduces_per_step": self.communication.all_reduces,
                "message_bytes_per_token": self.communication.message_bytes,
                "bytes_per_token": self.communication.bytes_per_token,
                "ring_sent_bytes_per_token": self.communication.sent_bytes_per_token,
                "logit_bytes_per_sequence": self.communication.logit_bytes,
                "quick_reduce_from_tokens": dict(self.quick_reduce_tokens),
            },
        }


def shape_report(config: Mapping[str, Any], setup: Setup) -> ShapeReport:
    """Answer for a parsed ``config.json``.

    Raises:
        ShapeError: the config lacks a field, or a size does not split over the ranks.
        StateError: a field of the cached planes is missing or contradicts another.
    """
    sizes = read_sizes(config)
    layout = Layout(setup.tp, setup.fused, setup.index_sources)
    sent = communication(sizes, setup.tp, dtype_bytes(setup.activation))
    return ShapeReport(
        tp=setup.tp,
        heads=local_heads(sizes, setup.tp),
        linears=tuple(local_linears(sizes, layout)),
        weights={dtype: _weights(sizes, layout, dtype, setup) for dtype in setup.weights},
        caches=tuple(_cache(config, sizes, setup, kv, index) for kv, index in setup.caches),
        communication=sent,
        quick_reduce_tokens=_quick_reduce(setup.tp, sent.message_bytes),
    )


def _weights(sizes: M3Sizes, layout: Layout, dtype: str, setup: Setup) -> dict[str, int]:
    """Bytes on one rank by part; a draft is in the activations' type, whatever the target's weights are in."""
    parts = weight_bytes(sizes, layout, dtype)
    if setup.draft_config is not None:
        draft = read_draft_sizes(setup.draft_config)
        parts["EAGLE3 draft"] = draft_weight_bytes(draft, layout.tp, dtype_bytes(setup.activation))
    return parts


def _cache(config: Mapping[str, Any], sizes: M3Sizes, setup: Setup, kv: str, index: str) -> Cache:
    def planes(sources: Collection[int] | None) -> tuple[Plane, ...]:
        kept = prefix_state_planes(
            config,
            kv_dtype=kv,
            index_dtype=index,
            tp=setup.tp,
            index_sources=sources,
            draft_config=setup.draft_config,
        )
        return tuple(kept)

    def tokens(sources: Collection[int] | None) -> dict[str, int]:
        if setup.memory_bytes is None:
            return {}
        per_token, layout = bytes_per_token(planes(sources)), Layout(setup.tp, setup.fused, sources)
        held = {dtype: sum(_weights(sizes, layout, dtype, setup).values()) for dtype in setup.weights}
        left = {dtype: setup.memory_bytes - size for dtype, size in held.items()}
        return {dtype: capacity_tokens(size, per_token, setup.page_size) for dtype, size in left.items()}

    reuse = setup.compared_sources
    return Cache(kv, index, planes(None), planes(reuse), tokens(None), tokens(reuse))


def _quick_reduce(tp: int, message_bytes: int) -> dict[str, int]:
    floors = {codec: min_message_bytes(codec, tp) for codec in CODECS}
    return {codec: -(-floor // message_bytes) for codec, floor in floors.items() if floor is not None}
