"""The tiny M3's shape, in the published configuration's own field names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ARCHITECTURE = "MiniMaxM3SparseForCausalLM"


@dataclass(frozen=True, slots=True)
class TinyM3Shape:
    """Sizes of a tiny M3: every mechanism of the real model, nothing of its size.

    The sparse block is the real one (128 tokens), so that page size, alignment loss and block selection are the
    real ones too. With ``topk_blocks`` of 4, selection starts to choose beyond 512 tokens of context.
    """

    hidden_size: int = 128
    num_layers: int = 6
    num_dense_layers: int = 1  # as in the published model, the first layers are dense in attention and MLP
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 16
    num_experts: int = 8
    experts_per_token: int = 2
    expert_size: int = 64
    dense_size: int = 256
    num_index_heads: int = 2
    index_dim: int = 32
    block_size: int = 128
    topk_blocks: int = 4
    init_blocks: int = 0
    local_blocks: int = 1
    vocab_size: int = 320
    max_position: int = 32_768
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not 0 < self.num_dense_layers < self.num_layers:
            raise ValueError("num_dense_layers must be in 1..num_layers-1: M3 has both kinds of layer")
        if self.num_heads % self.num_kv_heads or self.num_index_heads % self.num_kv_heads:
            raise ValueError("num_heads and num_index_heads must be multiples of num_kv_heads")
        if self.init_blocks + self.local_blocks > self.topk_blocks:
            raise ValueError("init_blocks + local_blocks must not exceed topk_blocks: they are part of the top-k")

    def hf_config(self, *, bos_id: int, eos_id: int) -> dict[str, Any]:
        """``config.json`` of the text model, as a dict."""
        sparse = [0] * self.num_dense_layers + [1] * (self.num_layers - self.num_dense_layers)
        return {
            "architectures": [ARCHITECTURE],
            # The published text config says minimax_m2 too: the fields M3 adds travel as extra attributes.
            "model_type": "minimax_m2",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim,
            "partial_rotary_factor": self.rotary_dim / self.head_dim,
            "rope_theta": 5_000_000,
            "max_position_embeddings": self.max_position,
            "intermediate_size": self.expert_size,
            "dense_intermediate_size": self.dense_size,
            "shared_intermediate_size": self.expert_size,
            "n_shared_experts": 1,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "moe_layer_freq": sparse,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "rms_norm_eps": 1e-6,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "use_cache": True,
            "num_mtp_modules": 0,
            "torch_dtype": self.dtype,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_attention_freq": sparse,
                "sparse_disable_index_value": sparse,
                "sparse_num_index_heads": self.num_index_heads,
                "sparse_index_dim": self.index_dim,
                "sparse_block_size": self.block_size,
                "sparse_topk_blocks": self.topk_blocks,
                "sparse_init_block": self.init_blocks,
                "sparse_local_block": self.local_blocks,
                "sparse_score_type": "max",
            },
        }
