"""Dense attention along a chain of drafts on a CPU: verification by the target's dense layers, and the draft itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from agentserve.runtime.sglang_dense import DenseTorchAttnBackend

BACKEND = "torch_native"  # the draft's, by the name that --speculative-draft-attention-backend takes


class ChainDenseBackend(DenseTorchAttnBackend):
    """``DenseTorchAttnBackend`` that also verifies a chain, and draws one.

    Args:
        runner: SGLang's model runner.
        draft_step: None for a target or a draft-extend; i where this backend serves the i-th step of a draft's
            decode loop, whose sequences are i + 1 tokens longer than the committed length that SGLang passes.
    """

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        super().__init__(runner)
        self._draft_step = draft_step

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if forward_batch.forward_mode.is_target_verify():
            # A verification is an extend by a fixed number of tokens; SGLang sets no extend lengths for it.
            count = forward_batch.spec_info.draft_token_num
            forward_batch = copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = forward_batch.seq_lens
            forward_batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, count)
            forward_batch.seq_lens = forward_batch.seq_lens + count
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if self._draft_step is not None:
            forward_batch = copy.copy(forward_batch)
            forward_batch.seq_lens = forward_batch.seq_lens + self._draft_step + 1
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


class ChainDraftBackend:
    """One backend a step of the draft's decode loop, which has one step fewer than drafts."""

    def __init__(self, runner: Any, steps: int) -> None:
        self.attn_backends = [ChainDenseBackend(runner, step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def draft_decode_backend(original: Callable[..., Any], self: Any) -> Any:
    """AROUND ``DraftBackendFactory.create_decode_backend``."""
    if self.draft_attn_backend != BACKEND or self.speculative_num_steps <= 1:
        return original(self)
    return _named(ChainDraftBackend(self.draft_model_runner, self.speculative_num_steps))


def draft_extend_backend(original: Callable[..., Any], self: Any) -> Any:
    """AROUND ``DraftBackendFactory.create_draft_extend_backend``."""
    if self.draft_attn_backend != BACKEND:
        return original(self)
    return _named(ChainDenseBackend(self.draft_model_runner))


def _named(backend: Any) -> Any:
    for each in (backend, *getattr(backend, "attn_backends", ())):
        each.prefill_attention_backend_str = each.decode_attention_backend_str = BACKEND
    return backend
