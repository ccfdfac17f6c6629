"""What the EAGLE3 benchmark puts into SGLang's processes beside the target's random weights.

``index_reuse_weights`` fills norms with 0, which is 1 for M3's norms and nothing for a Llama's: every draft would be
token 0, all rows of a verification would go to the same experts, and speculation would look faster than it is.

Two packages that SGLang imports on the way to drafting may be missing beside a small installation. Without CUTLASS's,
the draft's gate and up projection run as the ordinary product instead of the fused kernel for few tokens, which makes a
draft slower, never faster. FlashMLA's is only asked for a class that an M3 draft's backend is compared with.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch


def register() -> None:
    """Called by SGLang early in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", norms, HookType.AFTER)
    if importlib.util.find_spec("flash_mla") is None:
        name = "sglang.srt.layers.attention.flashmla_backend"
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].FlashMLABackend = type("FlashMLABackend", (), {})  # type: ignore[attr-defined]
    if importlib.util.find_spec("cutlass") is None:
        HookRegistry.register("sglang.srt.layers.dual_gemm.DualGemm._select_mode", no_fused_gate, HookType.REPLACE)


def no_fused_gate(self: Any, gate_up_proj: Any, hidden_size: int) -> None:
    """REPLACE ``DualGemm._select_mode``: what it answers on devices that the kernel does not run on."""


@torch.no_grad()
def norms(result: Any, model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """AFTER ``initialize_dummy_weights``: a draft's norms leave the scale as it is."""
    if type(model).__name__ != "LlamaForCausalLMEagle3":
        return
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.fill_(1.0)
