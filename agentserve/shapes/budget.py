"""Bytes of one rank: weights, messages between ranks, and tokens that fit into memory."""

from __future__ import annotations

from dataclasses import dataclass

from agentserve.shapes.linears import Layout, indexed_layers, local_linears, padded_vocab
from agentserve.shapes.model import M3Sizes, ShapeError

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MXFP8_SCALE_BLOCK = 32  # weights of one row that share a scale of one byte (OCP Microscaling, MXFP8)

WEIGHT_TYPES = (*_ELEMENT_BYTES, "mxfp8")


def weight_bytes(sizes: M3Sizes, layout: Layout, dtype: str) -> dict[str, int]:
    """Bytes of weights on one rank, by part of the model.

    Layers that take over a block selection hold no index projections (``agentserve.runtime.sglang_index_reuse``).

    Args:
        dtype: float32, bfloat16, float16 or mxfp8. In an MXFP8 checkpoint the router, embeddings, LM head and norms
            stay in bfloat16 (SGLang gives them no quantization config).

    Raises:
        ShapeError: an unknown type, or a size does not split over the ranks.
    """
    if dtype not in WEIGHT_TYPES:
        raise ShapeError(f"cannot size weights of type '{dtype}'; known types: {', '.join(WEIGHT_TYPES)}")
    plain = _ELEMENT_BYTES.get(dtype, _ELEMENT_BYTES["bfloat16"])
    parts: dict[str, int] = {}
    for linear in local_linears(sizes, layout):
        if dtype == "mxfp8" and not linear.keeps_precision:
            row = linear.k + -(-linear.k // _MXFP8_SCALE_BLOCK)
        else:
            row = linear.k * plain
        parts[linear.part] = parts.get(linear.part, 0) + linear.n * row * linear.count
    # The router's selection bias, float32 whatever the model's type.
    parts["router"] += sizes.num_local_experts * 4 * len(sizes.moe_layers)
    parts["embedding"] = padded_vocab(sizes, layout.tp) // layout.tp * sizes.hidden_size * plain
    index_norms = 2 * sizes.sparse_attention_config.sparse_index_dim * len(indexed_layers(sizes, layout))
    head_norms = 2 * sizes.head_dim * sizes.num_hidden_layers
    layer_norms = sizes.hidden_size * (2 * sizes.num_hidden_layers + 1)
    parts["norms"] = (layer_norms + head_norms + index_norms) * plain
    return parts


@dataclass(frozen=True, slots=True)
class Communication:
    """What tensor parallelism sends for one token of a step.

    Attributes:
        all_reduces: per step, whatever its tokens: after attention and after the MLP of each layer, and once after
            the embedding; 0 on one rank.
        message_bytes: one token's part of each message.
        logit_bytes: bytes of logits that each rank contributes to the gather, per sampling sequence; 0 on one rank.
        ring_factor: bytes that a rank sends in a ring all-reduce, over the message's size: ``2 (tp - 1) / tp``.
    """

    all_reduces: int
    message_bytes: int
    logit_bytes: int
    ring_factor: float

    @property
    def bytes_per_token(self) -> int:
        """Message bytes of one token, all all-reduces together."""
        return self.all_reduces * self.message_bytes

    @property
    def sent_bytes_per_token(self) -> float:
        """Bytes that each rank puts on the wire for one token with ring all-reduces."""
        return self.bytes_per_token * self.ring_factor


def communication(sizes: M3Sizes, tp: int, activation_bytes: int) -> Communication:
    """Messages of ``tp`` ranks with activations of ``activation_bytes`` an element.

    SGLang adds the residual after the reduction, so each message is one hidden state
    (``srt/models/minimax_m3.py``: ``reduce_results=False`` and the layer boundary's reduction).
    """
    if tp == 1:
        return Communication(0, sizes.hidden_size * activation_bytes, 0, 0.0)
    return Communication(
        all_reduces=2 * sizes.num_hidden_layers + 1,
        message_bytes=sizes.hidden_size * activation_bytes,
        logit_bytes=padded_vocab(sizes, tp) // tp * activation_bytes,
        ring_factor=2 * (tp - 1) / tp,
    )


def capacity_tokens(memory_bytes: float, bytes_per_token: int, page_size: int) -> int:
    """Tokens of KV cache that fit, in whole pages; 0 where nothing does."""
    return max(0, int(memory_bytes // (bytes_per_token * page_size))) * page_size
