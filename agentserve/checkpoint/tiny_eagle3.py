"""Write a random EAGLE3 draft for the tiny M3, in the published form (``LlamaForCausalLMEagle3``).

One Llama layer that reads the next token's embedding beside three of the target's hidden states, and its own, smaller
vocabulary with the table ``d2t`` back to the target's. Being random it is next to never right: it shows that a draft
cannot change what the target writes, and what drafting costs, not what it gains.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.folder import make_folder

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True, slots=True)
class TinyDraftShape:
    """Sizes of the draft. The head counts differ from the target's, as in the published pair: a target and a draft
    that differ in nothing would hide a cache or a plan that is shared by mistake."""

    target: TinyM3Shape
    num_heads: int = 8
    num_kv_heads: int = 4
    mlp_size: int = 256
    vocab_size: int = 256  # of the target's 320

    def __post_init__(self) -> None:
        if not 0 < self.vocab_size <= self.target.vocab_size:
            raise ValueError(f"vocab_size must be in 1..{self.target.vocab_size}, the target's; got {self.vocab_size}")

    @property
    def head_dim(self) -> int:
        return self.target.head_dim

    @property
    def capture_layers(self) -> tuple[int, int, int]:
        """Target layers after which the hidden states are taken: early, middle, late."""
        last = self.target.num_layers - 1
        return (0, last // 2, last - 1)

    def hf_config(self) -> dict[str, Any]:
        """``config.json`` of the draft, as a dict."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": self.target.hidden_size,
            "target_hidden_size": self.target.hidden_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp_size,
            "hidden_act": "silu",
            "vocab_size": self.target.vocab_size,
            "draft_vocab_size": self.vocab_size,
            "max_position_embeddings": self.target.max_position,
            "rope_theta": 5_000_000,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "torch_dtype": self.target.dtype,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.capture_layers),
            },
        }


def write_tiny_eagle3(
    folder: Path, *, seed: int = 0, shape: TinyDraftShape | None = None, overwrite: bool = False
) -> Path:
    """Write config and weights of a random EAGLE3 draft.

    Args:
        folder: where to write; created if missing.
        seed: of the weights; same seed and shape, same bytes.
        shape: sizes; the default fits the default tiny M3.
        overwrite: replace an existing checkpoint.

    Returns:
        The folder, to be passed to ``agentserve launch --eagle3``.

    Raises:
        CheckpointFolderError: the folder is not empty and ``overwrite`` is not set, or cannot take a checkpoint.
    """
    shape = shape or TinyDraftShape(TinyM3Shape())
    make_folder(folder, overwrite=overwrite)
    save_file(dict(_tensors(shape, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    # config.json last: a folder that has it is complete
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    return folder


def _tensors(shape: TinyDraftShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.target.dtype)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, cols, generator=generator) * (gain / math.sqrt(cols))).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return (1 + torch.randn(size, generator=generator) * 0.1).to(dtype)

    hidden, head = shape.target.hidden_size, shape.head_dim
    yield "fc.weight", matrix(hidden, len(shape.capture_layers) * hidden)
    yield "midlayer.input_layernorm.weight", norm(hidden)
    yield "midlayer.hidden_norm.weight", norm(hidden)
    yield "midlayer.post_attention_layernorm.weight", norm(hidden)
    # the attention reads embedding and hidden state side by side
    yield "midlayer.self_attn.q_proj.weight", matrix(shape.num_heads * head, 2 * hidden)
    yield "midlayer.self_attn.k_proj.weight", matrix(shape.num_kv_heads * head, 2 * hidden)
    yield "midlayer.self_attn.v_proj.weight", matrix(shape.num_kv_heads * head, 2 * hidden)
    yield "midlayer.self_attn.o_proj.weight", matrix(hidden, shape.num_heads * head)
    yield "midlayer.mlp.gate_proj.weight", matrix(shape.mlp_size, hidden)
    yield "midlayer.mlp.up_proj.weight", matrix(shape.mlp_size, hidden)
    yield "midlayer.mlp.down_proj.weight", matrix(hidden, shape.mlp_size)
    yield "norm.weight", norm(hidden)
    yield "lm_head.weight", matrix(shape.vocab_size, hidden, gain=3.0)
    known = torch.randperm(shape.target.vocab_size, generator=generator)[: shape.vocab_size].sort().values
    # published as differences: draft id i is target id i + d2t[i]
    yield "d2t", known - torch.arange(shape.vocab_size)
    within = torch.zeros(shape.target.vocab_size, dtype=torch.bool)
    within[known] = True
    yield "t2d", within
