"""What the EAGLE3 benchmark puts into SGLang's processes beside the target's random weights: the draft's norms.

``index_reuse_weights`` fills norms with 0, which is 1 for M3's norms and nothing for a Llama's: every draft would be
token 0, all rows of a verification would go to the same experts, and speculation would look faster than it is.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Called by SGLang early in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", norms, HookType.AFTER)


@torch.no_grad()
def norms(result: Any, model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """AFTER ``initialize_dummy_weights``: a draft's norms leave the scale as it is."""
    if type(model).__name__ != "LlamaForCausalLMEagle3":
        return
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.fill_(1.0)
