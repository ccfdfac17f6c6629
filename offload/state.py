"""The planes of tensors that make up the cached state of an M3 prefix, as a pure description.

An M3 prefix is more than K and V: every sparse layer also keeps *index keys*, from which it selects the
blocks that a query attends to. A prefix restored without them gives other tokens and no error. Whoever counts,
moves or stores a prefix (memory preflight, offload) asks here what it consists of.

Sizes follow SGLang 0.5.23 (``srt/mem_cache/memory_pool.py: MiniMaxSparseKVPool`` and
``srt/model_executor/pool_configurator.py``): K and V in every layer, one index-K head in every sparse layer
(replicated on each rank), index V in those sparse layers that do not disable it. With index reuse
(``agentserve.runtime.index_reuse``) the layers that take over another's block selection keep no index K.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}


class StateError(ValueError):
    """A config that does not describe an M3 prefix. The message names the config field."""


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of tensor kept for every token of a prefix.

    Attributes:
        name: ``K``, ``V``, ``index-K``, ``index-V``, ``draft-K`` or ``draft-V``.
        layers: ids of the layers that keep it, ascending.
        heads_per_rank: heads stored on one tensor-parallel rank.
        head_dim: elements per head.
        dtype: element type, a key of the table of sizes (``bfloat16``, ``fp8_e4m3``, ...).
    """

    name: str
    layers: tuple[int, ...]
    heads_per_rank: int
    head_dim: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token on one rank, all layers together."""
        return len(self.layers) * self.heads_per_rank * self.head_dim * dtype_bytes(self.dtype)


def dtype_bytes(dtype: str) -> int:
    """Bytes per element; raises StateError for a type whose layout is not plain elements (nvfp4, mxfp8)."""
    try:
        return _DTYPE_BYTES[dtype]
    except KeyError:
        known = ", ".join(_DTYPE_BYTES)
        raise StateError(f"cannot size elements of type '{dtype}'; known types: {known}") from None


def prefix_state_planes(
    config: Mapping[str, Any],
    *,
    kv_dtype: str,
    index_dtype: str,
    tp: int = 1,
    index_topk_freq: int = 1,
    index_sources: Collection[int] | None = None,
    draft_config: Mapping[str, Any] | None = None,
) -> list[Plane]:
    """The planes of a prefix on one rank, from a checkpoint's ``config.json``.

    Args:
        config: the parsed config, with or without a ``text_config`` level.
        kv_dtype: element type of K and V (and of the draft's).
        index_dtype: element type of index K and V.
        tp: tensor-parallel ranks; K/V heads are split over them, and replicated once there are more ranks
            than heads. The index head is replicated always.
        index_topk_freq: block selections are shared by this many consecutive sparse layers, so that only the
            first of each group needs index keys. SGLang 0.5.23 by itself allocates them in all sparse layers:
            its memory is that of 1.
        index_sources: instead of a frequency, the layers that choose blocks for themselves and others.
        draft_config: config of a speculative draft model whose K/V are part of the state, or None.

    Raises:
        StateError: the config lacks a field, or fields contradict each other.
    """
    if tp < 1 or index_topk_freq < 1:
        raise StateError(f"need tp >= 1 and index_topk_freq >= 1, got {tp} and {index_topk_freq}")
    if index_sources is not None and index_topk_freq != 1:
        raise StateError("give index_topk_freq or index_sources, not both")
    text = config.get("text_config") or config
    layers = tuple(range(_integer(text, "num_hidden_layers")))
    planes = _kv_planes("", text, layers, kv_dtype, tp)

    sparse = _section(text, config)
    flags = _flags(sparse, "sparse_attention_freq", len(layers))
    no_value = _flags(sparse, "sparse_disable_index_value", len(layers), default=[0] * len(layers))
    index_dim = _integer(sparse, "sparse_index_dim", prefix="sparse_attention_config.")
    sparse_layers = [layer for layer in layers if flags[layer]]
    with_value = tuple(layer for layer in sparse_layers if not no_value[layer])
    shareable = shareable_layers(config)
    sources = shareable[::index_topk_freq] if index_sources is None else tuple(index_sources)
    if not set(sources) <= set(shareable):
        raise StateError(f"index_sources {sorted(sources)} hold layers that choose no blocks; those are {shareable}")
    index_layers = tuple(sorted({*sources, *with_value}))
    if index_layers:
        planes.append(Plane("index-K", index_layers, 1, index_dim, index_dtype))
    if with_value:
        planes.append(Plane("index-V", with_value, 1, index_dim, index_dtype))

    if draft_config is not None:
        draft = draft_config.get("text_config") or draft_config
        draft_layers = tuple(range(_integer(draft, "num_hidden_layers")))
        planes += _kv_planes("draft-", draft, draft_layers, kv_dtype, tp)
    return planes


def shareable_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers whose block selection others can take over: sparse, and without index V (ids, ascending).

    An index branch with values adds to the layer's output, so it cannot be left out
    (``srt/layers/attention/minimax_sparse_backend.py``: ``_topk_is_source``).

    Raises:
        StateError: the config lacks a field.
    """
    text = config.get("text_config") or config
    count = _integer(text, "num_hidden_layers")
    sparse = _section(text, config)
    flags = _flags(sparse, "sparse_attention_freq", count)
    no_value = _flags(sparse, "sparse_disable_index_value", count, default=[0] * count)
    return tuple(layer for layer in range(count) if flags[layer] and no_value[layer])


def bytes_per_token(planes: Iterable[Plane]) -> int:
    """Bytes per token on one rank, all planes together."""
    return sum(plane.bytes_per_token for plane in planes)


def _kv_planes(prefix: str, text: Mapping[str, Any], layers: tuple[int, ...], dtype: str, tp: int) -> list[Plane]:
    heads = _integer(text, "num_key_value_heads")
    if text.get("head_dim"):
        head_dim = _integer(text, "head_dim")
    else:
        head_dim = _integer(text, "hidden_size") // _integer(text, "num_attention_heads")
    if max(heads, tp) % min(heads, tp):
        raise StateError(
            f"num_key_value_heads={heads} cannot be split over or replicated on tp={tp} ranks; "
            f"choose tp so that one divides the other"
        )
    per_rank = max(1, heads // tp)
    return [Plane(prefix + name, layers, per_rank, head_dim, dtype) for name in ("K", "V")]


def _section(text: Mapping[str, Any], config: Mapping[str, Any]) -> Mapping[str, Any]:
    sparse = text.get("sparse_attention_config") or config.get("sparse_attention_config")
    if not isinstance(sparse, Mapping):
        raise StateError("config has no 'sparse_attention_config'; is it a MiniMax-M3 checkpoint?")
    return sparse


def _flags(sparse: Mapping[str, Any], name: str, layers: int, default: list[int] | None = None) -> list[int]:
    value = sparse.get(name, default)
    if not isinstance(value, list) or len(value) != layers:
        raise StateError(
            f"config field 'sparse_attention_config.{name}' must list one flag for each of {layers} layers"
        )
    return [int(flag) for flag in value]


def _integer(section: Mapping[str, Any], name: str, prefix: str = "") -> int:
    value = section.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StateError(f"config field '{prefix}{name}' must be a positive integer, got {value!r}")
    return value
