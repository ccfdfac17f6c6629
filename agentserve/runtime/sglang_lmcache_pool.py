"""What LMCache registers of an M3 pool: all planes, or an error. Checked against sglang 0.5.23 and lmcache 0.5.6."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from offload.fingerprint import fingerprint
from offload.seal import new_seals
from offload.settings import OffloadError, settings_from

_SEALS = "agentserve_seals"  # attribute of the pool, set when LMCache asks for its tensors
# Settings by environment that change K, V or the choice of blocks; ports and paths do not begin like this.
_MODEL_VARIABLES = ("SGLANG_OPT_", "SGLANG_MINIMAX_", "SGLANG_DISABLE_M3_", "AGENTSERVE_INDEX_", "AGENTSERVE_EAGLE3")
_TABLES = ("k_data_ptrs", "v_data_ptrs", "data_ptrs", "data_strides")  # addresses and strides: a row a buffer
_DRAFT = "agentserve_draft"  # attribute of the target's pool: the pool of an EAGLE3 draft, in the same slots


class Plane(NamedTuple):
    """One tensor of the state of a prefix."""

    name: str  # as "K 3" or "index-K 3": plane and place in its pool
    tensor: torch.Tensor  # (slots, heads, head size)
    dtype: torch.dtype  # of its elements: SGLang allocates both kinds of FP8 as uint8

    @property
    def layout(self) -> str:
        """What must be equal for a stored page to fit."""
        return f"{self.name} {tuple(self.tensor.shape[1:])} {self.dtype}"


def planes_of(pool: Any) -> list[Plane]:
    """Every tensor that makes up a prefix in an M3 pool: K, V, then index K, then index V where layers have one, then
    the draft's K and V where one is attached.

    Raises:
        OffloadError: the pool is no M3 pool, is of a kind that LMCache cannot address by slots, or holds a tensor
            of its length that is none of these planes: it would be lost, and the output would change silently.
    """
    # At the call: index reuse replaces the class in its module.
    from sglang.srt.mem_cache import memory_pool

    if not isinstance(pool, memory_pool.MiniMaxSparseKVPool):
        raise OffloadError(
            f"offload knows what makes up a prefix in a MiniMaxSparseKVPool only, this server's pool is a "
            f"{type(pool).__name__}; leave offload out"
        )
    if pool.dense_pool is not None or pool._enable_hisparse:
        raise OffloadError("offload does not run with HiSparse, whose slots are no addresses; leave one of them out")
    planes = _buffers("K", pool.main_pool, "k_buffer") + _buffers("V", pool.main_pool, "v_buffer")
    keys = 0
    for index_pool in (pool.index_k_pool, pool.index_kv_pool):
        if index_pool is not None:
            made = _buffers("index-K", index_pool, "k_buffer", keys)
            keys += len(made)
            planes += made
    if pool.index_kv_pool is not None:
        planes += _buffers("index-V", pool.index_kv_pool, "v_buffer")
    layers = len(pool.index_k_layer_id_mapping) + len(pool.index_kv_layer_id_mapping)
    if keys != layers:
        raise OffloadError(f"{type(pool).__name__} has {keys} buffers of index keys for {layers} layers")
    slots = pool.size + pool.page_size
    draft = draft_of(pool)
    if draft is not None:
        drafts = _buffers("draft-K", draft.pool, "k_buffer") + _buffers("draft-V", draft.pool, "v_buffer")
        if any(plane.tensor.shape[0] != planes[0].tensor.shape[0] for plane in drafts):
            raise OffloadError(
                f"the draft's pool has {drafts[0].tensor.shape[0]} slots where the target's has "
                f"{planes[0].tensor.shape[0]}: its K and V cannot go with the target's; leave offload out"
            )
        planes += drafts
    known = {plane.tensor.data_ptr() for plane in planes} | {0}
    for where, tensor in [*_tensors(pool), *(_tensors(draft.pool, "draft.") if draft is not None else ())]:
        if tensor.dim() and tensor.shape[0] >= slots // pool.page_size and tensor.data_ptr() not in known:
            raise OffloadError(
                f"{type(pool).__name__}.{where} is a tensor of {tuple(tensor.shape)} that offload does not know: a "
                f"prefix restored without it would be incomplete; leave offload out"
            )
    return planes


class Draft(NamedTuple):
    """An EAGLE3 draft beside its target."""

    pool: Any  # K and V, in the target's slots
    checkpoint: Path


def attach_draft(pool: Any, draft: Draft) -> None:
    """Make a draft's K and V part of the prefixes of its target's pool."""
    setattr(pool, _DRAFT, draft)


def draft_of(pool: Any) -> Draft | None:
    """What was attached to the target's pool, if anything."""
    return getattr(pool, _DRAFT, None)


def seals_of(pool: Any) -> torch.Tensor | None:
    """Where the seals of the pool's pages live; None where they are switched off or LMCache has not asked yet."""
    return getattr(pool, _SEALS, None)


def state_name(pool: Any, model_config: Any, page_size: int, chunk_tokens: int) -> str:
    """A name for all that decides what a page of the pool holds beside its tokens: the model's name in every key.

    Raises:
        FingerprintError: a checkpoint cannot be read.
    """
    layout = [plane.layout for plane in planes_of(pool)] + ([] if seals_of(pool) is None else ["seals"])
    settings = {
        "page_size": page_size,
        "chunk_tokens": chunk_tokens,
        "dtype": str(model_config.dtype),
        "quantization": str(model_config.quantization),
        **{name: value for name, value in os.environ.items() if name.startswith(_MODEL_VARIABLES)},
    }
    draft = draft_of(pool)
    if draft is not None:
        settings["draft"] = fingerprint(draft.checkpoint, [], {})
    return f"agentserve-{fingerprint(Path(model_config.model_path), layout, settings)}"


def pool_tensors(original: Callable[..., Any], self: Any, kv_pool: Any) -> tuple[torch.Tensor, ...]:
    """AROUND ``SGLangUnifiedKVAdapter._resolve_pool_tensors``: all planes of an M3 pool, in shared memory on a CPU."""
    planes = planes_of(kv_pool)
    tensors = tuple(plane.tensor for plane in planes)
    settings = settings_from()
    if settings is not None and settings.verify and seals_of(kv_pool) is None:
        pages = tensors[0].shape[0] // kv_pool.page_size
        setattr(kv_pool, _SEALS, new_seals(pages, tensors[0].device))
    if tensors[0].device.type == "cpu":
        seals = seals_of(kv_pool)
        _share([*tensors, *([] if seals is None else [seals])])
        draft = draft_of(kv_pool)
        drafts = () if draft is None else (draft.pool,)
        for pool in (kv_pool.main_pool, kv_pool.index_k_pool, kv_pool.index_kv_pool, *drafts):
            if getattr(pool, "k_data_ptrs", None) is not None:
                pool._init_data_ptrs_and_strides()  # the tensors have moved
    return tensors


def page_tensors(original: Callable[..., Any], self: Any, kv_pool: Any) -> tuple[torch.Tensor, ...]:
    """AROUND ``SGLangUnifiedKVAdapter._resolve_dsa_indexer_tensors``: the seals, one row a page.

    Upstream's place for tensors that have rows by page and share the pages' ids with K and V.
    """
    seals = seals_of(kv_pool)
    return () if seals is None else (seals,)


def _share(tensors: list[torch.Tensor]) -> None:
    """Move the pool's own tensors to shared memory.

    LMCache moves what it is handed, and it is handed views: the pool would go on writing to its old memory, and the
    daemon would store zeros.
    """
    from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap

    for tensor in tensors:
        migrate_to_shm_and_wrap(tensor)


def _buffers(name: str, pool: Any, attribute: str, first: int = 0) -> list[Plane]:
    if getattr(pool, "kv_cache_layout", "nhd") != "nhd":
        raise OffloadError(f"offload needs the KV layout nhd, this server's is {pool.kv_cache_layout}")
    buffers = getattr(pool, attribute, None)
    if not buffers:
        raise OffloadError(f"{type(pool).__name__} has no {attribute}: its {name} cannot be offloaded")
    return [Plane(f"{name} {first + i}", tensor, pool.dtype) for i, tensor in enumerate(buffers)]


def _tensors(pool: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors reachable from a pool's attributes, its sub-pools and lists included."""
    for name, value in vars(pool).items():
        if name == _SEALS or name in _TABLES:
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        for item in values:
            if isinstance(item, torch.Tensor):
                yield f"{path}{name}", item
            elif depth and hasattr(item, "page_size") and hasattr(item, "__dict__"):
                yield from _tensors(item, f"{path}{name}.", depth - 1)
