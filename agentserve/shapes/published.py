"""MiniMax-M3's published geometry, for machines that do not hold the checkpoint.

The numbers are those of ``MiniMaxAI/MiniMax-M3``'s text config as transformers 5.19 ships them
(``models/minimax_m3_vl/configuration_minimax_m3_vl.py``), and of SGLang's cookbook for the three dense layers.
``tests/test_shapes_upstream.py`` compares them with transformers.
"""

from __future__ import annotations

from typing import Any

HUB_PREFIX = "MiniMaxAI/MiniMax-M3"  # also the quantized ones, as MiniMax-M3-MXFP8

_SPARSE = [0] * 3 + [1] * 57

M3_CONFIG: dict[str, Any] = {
    "hidden_size": 6144,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "n_shared_experts": 1,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "moe_layer_freq": _SPARSE,
    "vocab_size": 200064,
    "tie_word_embeddings": False,
    "sparse_attention_config": {
        "sparse_attention_freq": _SPARSE,
        "sparse_disable_index_value": _SPARSE,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_block_size": 128,
        "sparse_topk_blocks": 16,
    },
}
