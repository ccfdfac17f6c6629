"""transformers' MiniMax-M3 (``minimax_m3_vl``, text model) loaded from a checkpoint in the published text form.

An implementation that shares no code with SGLang, run in float32 with eager attention: what a parity test needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Published name -> transformers name, where they differ (transformers/conversion_mapping.py, 5.19).
_RENAMED = {
    ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
    ".block_sparse_moe.": ".mlp.",
    ".self_attn.index_q_proj.": ".self_attn.indexer.q_proj.",
    ".self_attn.index_k_proj.": ".self_attn.indexer.k_proj.",
    ".self_attn.index_q_norm.": ".self_attn.indexer.q_norm.",
    ".self_attn.index_k_norm.": ".self_attn.indexer.k_norm.",
}


class ReferenceM3:
    """Log-probabilities of a checkpoint by transformers.

    Args:
        folder: checkpoint with ``config.json`` and safetensors in the published names.

    Raises:
        ValueError: a tensor of the checkpoint has no place in the model, or the other way round.
    """

    def __init__(self, folder: Path) -> None:
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

        raw = json.loads((folder / "config.json").read_text())
        init_blocks = raw["sparse_attention_config"].get("sparse_init_block", 0)
        if init_blocks:
            raise ValueError(f"transformers' M3 has no init blocks, the checkpoint has {init_blocks}")
        for key in ("architectures", "model_type"):
            raw.pop(key)
        config = MiniMaxM3VLTextConfig(**raw)
        config._attn_implementation = "eager"
        model: Any = MiniMaxM3VLForCausalLM(config).to(torch.float32)
        tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            tensors.update(load_file(shard))
        missing, unexpected = model.load_state_dict(_to_transformers(tensors), strict=False)
        if missing or unexpected:
            raise ValueError(f"{folder}: missing {missing[:3]}, unexpected {unexpected[:3]}")
        self.model = model.eval()

    def share_selections(self, source_of: Mapping[int, int]) -> None:
        """From now on a layer uses the block selection of ``source_of[layer]``, an earlier layer or itself.

        Written from what sharing means, with transformers' own indexer and mask: a reuser's indexer is not run, and
        its mask is built from what the source's indexer last returned.
        """
        chosen: dict[int, torch.Tensor] = {}
        for layer, source in source_of.items():
            indexer = self.model.model.layers[layer].self_attn.indexer
            if layer == source:
                indexer.register_forward_hook(lambda _, __, blocks, layer=layer: chosen.update({layer: blocks}))
            else:
                indexer.forward = lambda *_, source=source, **__: chosen[source]

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities of every next token, float32 ``[len(token_ids), vocab]``, without any cache."""
        logits = self.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


def _to_transformers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = tensor.float()
    for name in [n for n in renamed if n.endswith(".gate_proj.weight")]:
        up = name.replace(".gate_proj.", ".up_proj.")
        renamed[name.replace(".gate_proj.", ".gate_up_proj.")] = torch.cat([renamed.pop(name), renamed.pop(up)])
    experts = sorted({n.partition(".experts.")[0] for n in renamed if ".experts." in n})
    for block in experts:
        count = len([n for n in renamed if n.startswith(f"{block}.experts.") and n.endswith(".w1.weight")])
        w1, w2, w3 = (
            torch.stack([renamed.pop(f"{block}.experts.{e}.{w}.weight") for e in range(count)])
            for w in ("w1", "w2", "w3")
        )
        renamed[f"{block}.experts.gate_up_proj"] = torch.cat([w1, w3], dim=1)
        renamed[f"{block}.experts.down_proj"] = w2
    return renamed
