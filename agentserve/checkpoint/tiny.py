"""Write a real, random MiniMax-M3 checkpoint that SGLang's own loader and transformers' own M3 both load.

``load_format=dummy`` gives weights that always produce the same token, so nothing measured with it proves
anything. Here every tensor is drawn with a scale that keeps activations alive: routing, block selection and
greedy outputs vary with the prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.folder import make_folder
from agentserve.checkpoint.tokenizer import (
    BOS,
    BYTE_TOKENS,
    EOS,
    SPECIAL_TOKENS,
    special_token_id,
    write_tokenizer,
)


def write_tiny_checkpoint(
    folder: Path, *, seed: int = 0, shape: TinyM3Shape | None = None, overwrite: bool = False
) -> Path:
    """Write config, tokenizer and weights of a random tiny M3.

    Args:
        folder: where to write; created if missing.
        seed: of the weights; same seed and shape, same bytes.
        shape: sizes; the default is the tiny M3 of the demo and the tests.
        overwrite: replace an existing checkpoint.

    Returns:
        The folder, to be passed to SGLang as the model path.

    Raises:
        CheckpointFolderError: the folder is not empty and ``overwrite`` is not set, or cannot take a checkpoint.
    """
    shape = shape or TinyM3Shape()
    if BYTE_TOKENS + len(SPECIAL_TOKENS) > shape.vocab_size:
        raise ValueError(f"vocab_size must be at least {BYTE_TOKENS + len(SPECIAL_TOKENS)}, got {shape.vocab_size}")
    make_folder(folder, overwrite=overwrite)
    config = shape.hf_config(bos_id=special_token_id(BOS), eos_id=special_token_id(EOS))
    tensors = dict(_random_tensors(shape, seed))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    # metadata format: transformers refuses safetensors without it
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    write_tokenizer(folder, max_length=shape.max_position)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    # config.json last: a folder that has it is complete
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _random_tensors(shape: TinyM3Shape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> torch.Tensor:
        weight = torch.randn(rows, cols, generator=generator) * (gain / math.sqrt(cols))
        return weight.to(dtype)

    def norm(size: int) -> torch.Tensor:
        # Gemma norms scale by 1 + weight
        return (torch.randn(size, generator=generator) * 0.1).to(dtype)

    hidden, head = shape.hidden_size, shape.head_dim
    yield "model.embed_tokens.weight", matrix(shape.vocab_size, hidden, gain=math.sqrt(hidden))
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", norm(hidden)
        yield f"{at}.post_attention_layernorm.weight", norm(hidden)
        yield f"{at}.self_attn.q_proj.weight", matrix(shape.num_heads * head, hidden)
        yield f"{at}.self_attn.k_proj.weight", matrix(shape.num_kv_heads * head, hidden)
        yield f"{at}.self_attn.v_proj.weight", matrix(shape.num_kv_heads * head, hidden)
        yield f"{at}.self_attn.o_proj.weight", matrix(hidden, shape.num_heads * head)
        yield f"{at}.self_attn.q_norm.weight", norm(head)
        yield f"{at}.self_attn.k_norm.weight", norm(head)
        if layer < shape.num_dense_layers:
            yield f"{at}.mlp.gate_proj.weight", matrix(shape.dense_size, hidden)
            yield f"{at}.mlp.up_proj.weight", matrix(shape.dense_size, hidden)
            yield f"{at}.mlp.down_proj.weight", matrix(hidden, shape.dense_size)
            continue
        yield f"{at}.self_attn.index_q_proj.weight", matrix(shape.num_index_heads * shape.index_dim, hidden)
        yield f"{at}.self_attn.index_k_proj.weight", matrix(shape.index_dim, hidden)
        yield f"{at}.self_attn.index_q_norm.weight", norm(shape.index_dim)
        yield f"{at}.self_attn.index_k_norm.weight", norm(shape.index_dim)
        moe = f"{at}.block_sparse_moe"
        # the router is float32 in the published checkpoint whatever the model's dtype
        yield (
            f"{moe}.gate.weight",
            torch.randn(shape.num_experts, hidden, generator=generator) / math.sqrt(hidden),
        )
        yield f"{moe}.e_score_correction_bias", torch.randn(shape.num_experts, generator=generator) * 0.1
        for expert in range(shape.num_experts):
            yield f"{moe}.experts.{expert}.w1.weight", matrix(shape.expert_size, hidden)
            yield f"{moe}.experts.{expert}.w3.weight", matrix(shape.expert_size, hidden)
            yield f"{moe}.experts.{expert}.w2.weight", matrix(hidden, shape.expert_size)
        yield f"{moe}.shared_experts.gate_proj.weight", matrix(shape.expert_size, hidden)
        yield f"{moe}.shared_experts.up_proj.weight", matrix(shape.expert_size, hidden)
        yield f"{moe}.shared_experts.down_proj.weight", matrix(hidden, shape.expert_size)
    yield "model.norm.weight", norm(hidden)
    yield "lm_head.weight", matrix(shape.vocab_size, hidden, gain=3.0)
