"""The functions behind the CPU platform's hooks; ``sglang_plugin`` says where each goes and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def build_sparse_kv_pool(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """AROUND ``KVCacheConfigurator._build_token_to_kv_pool``: build upstream's own M3 pool for an M3 target."""
    from sglang.srt.configs.model_config import is_minimax_sparse

    if is_minimax_sparse(self.model_config.hf_config):
        return self._build_minimax_sparse_kv_pool(max_total_num_tokens=kwargs["sizes"].max_total_num_tokens)
    return original(self, **kwargs)


def moe_with_split_gate(
    original: Callable[..., Any], layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any
) -> torch.Tensor:
    """AROUND ``moe_forward_native``: SwiGLU-OAI with gate and up as two halves, as M3's checkpoint stores them.

    Upstream ignores ``gate_up_interleaved`` and pairs even with odd columns. Only that one function differs, so it
    is exchanged for the duration of the call.
    """
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import (
        swiglu_no_interleaved_with_alpha_and_limit,
    )

    if moe_runner_config.gemm1_alpha is None or moe_runner_config.gate_up_interleaved:
        return original(layer, x, topk_output, moe_runner_config)
    interleaved = fused_moe_native.swiglu_gpt_oss_sigmoid_alpha
    fused_moe_native.swiglu_gpt_oss_sigmoid_alpha = swiglu_no_interleaved_with_alpha_and_limit
    try:
        return original(layer, x, topk_output, moe_runner_config)
    finally:
        fused_moe_native.swiglu_gpt_oss_sigmoid_alpha = interleaved


def router_logits(original: Callable[..., Any], self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """AROUND ``MiniMaxM3MoE._compute_router_logits``: the router's product in float32, whatever its weight's dtype."""
    return torch.nn.functional.linear(hidden_states.float(), self.gate.weight.float())
