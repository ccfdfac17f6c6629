"""Local shapes and weights against SGLang's own classes, built on the meta device for any number of ranks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.distributed.device_communicators.quick_all_reduce import QuickAllReduce, QuickReduceRegime  # noqa: E402
from sglang.srt.layers.quantization.fp8 import Fp8Config  # noqa: E402
from sglang.srt.layers.rotary_embedding import base, factory  # noqa: E402
from sglang.srt.models import minimax_m3  # noqa: E402
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from agentserve.shapes.budget import weight_bytes  # noqa: E402
from agentserve.shapes.draft import draft_weight_bytes, read_draft_sizes  # noqa: E402
from agentserve.shapes.linears import Layout, local_heads, local_linears  # noqa: E402
from agentserve.shapes.model import read_sizes  # noqa: E402
from agentserve.shapes.published import M3_CONFIG  # noqa: E402
from agentserve.shapes.quick_reduce import CODECS, MIN_BYTES  # noqa: E402
from tests.test_shapes import DRAFT  # noqa: E402

SIZES = read_sizes(M3_CONFIG)
# What the real classes read besides the sizes.
REST = {
    "rotary_dim": 64,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 5e6,
    "rope_scaling": None,
    "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"},
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
}


@pytest.fixture(autouse=True)
def _no_rope_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """RoPE has no weights but looks for a GPU kernel; and it is cached, which one on the meta device must not be."""
    monkeypatch.setattr(base, "_is_cpu", True)
    monkeypatch.setattr(factory, "_ROPE_DICT", {})


@contextmanager
def rank_of(tp: int) -> Iterator[None]:
    """SGLang's classes take this process for rank 0 of ``tp``; everything global is restored."""
    group = SimpleNamespace(rank_in_group=0, world_size=tp, cpu_group=None)
    parallel = {
        "tp_size": tp,
        "tp_rank": 0,
        "attn_tp_size": tp,
        "attn_tp_rank": 0,
        "moe_tp_size": tp,
        "moe_tp_rank": 0,
        "moe_ep_size": 1,
        "moe_ep_rank": 0,
        "tp_group": group,
        "attn_tp_group": group,
        "pp_group": SimpleNamespace(rank_in_group=0, world_size=1),
    }
    dtype = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.bfloat16)
        stack.enter_context(get_context().override_server_args(model_path="dummy", device="cpu", tp_size=tp))
        stack.enter_context(get_parallel().override(**parallel))
        stack.enter_context(torch.device("meta"))
        yield


def modules(tp: int, mxfp8: bool) -> dict[str, Any]:
    """One of each kind of module, as a rank holds it."""
    config = SimpleNamespace(**M3_CONFIG, **REST)
    quant = None
    if mxfp8:
        quant = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[1, 32], use_mxfp8=True)
    with rank_of(tp):
        return {
            "dense attention": minimax_m3.MiniMaxM3Attention(config, 0, quant),
            "sparse attention": minimax_m3.MiniMaxM3Attention(
                config, 3, quant, is_sparse_attention_layer=True, disable_index_value=True
            ),
            "dense MLP": minimax_m3.MiniMaxM3MLP(config, quant, intermediate_size=config.dense_intermediate_size),
            "MoE": minimax_m3.MiniMaxM3MoE(config, 3, quant),
            "norm": minimax_m3.GemmaRMSNorm(config.hidden_size),
            "embedding": minimax_m3.VocabParallelEmbedding(config.vocab_size, config.hidden_size),
            "LM head": minimax_m3.ParallelLMHead(config.vocab_size, config.hidden_size, quant_config=quant),
        }


COUNTS = {"dense attention": 3, "sparse attention": 57, "dense MLP": 3, "MoE": 57, "norm": 121}

# Our name -> module and parameter of SGLang that hold it.
WHERE = {
    "index q/k": ("sparse attention", "index_qkv_proj.weight"),
    "qkv": ("sparse attention", "qkv_proj.weight"),
    "o": ("sparse attention", "o_proj.weight"),
    "router": ("MoE", "gate.weight"),
    "experts w1/w3": ("MoE", "experts.w13_weight"),
    "experts w2": ("MoE", "experts.w2_weight"),
    "shared expert w1/w3": ("MoE", "shared_experts.gate_up_proj.weight"),
    "shared expert w2": ("MoE", "shared_experts.down_proj.weight"),
    "dense w1/w3": ("dense MLP", "gate_up_proj.weight"),
    "dense w2": ("dense MLP", "down_proj.weight"),
    "LM head": ("LM head", "weight"),
}


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("mxfp8", [False, True], ids=["bf16", "mxfp8"])
def test_shapes_and_weights_are_those_of_the_real_classes(tp: int, mxfp8: bool) -> None:
    built = modules(tp, mxfp8)
    linears = {linear.name: linear for linear in local_linears(SIZES, Layout(tp, fused=False))}
    assert set(linears) == set(WHERE)
    for name, (module, parameter) in WHERE.items():
        shape = tuple(built[module].get_parameter(parameter).shape)
        ours = linears[name]
        assert shape == ((ours.copies, ours.n, ours.k) if ours.copies > 1 else (ours.n, ours.k)), name

    attention, heads = built["sparse attention"], local_heads(SIZES, tp)
    assert (attention.num_heads, attention.num_kv_heads, attention.num_idx_heads) == (
        heads.query,
        heads.kv,
        heads.index,
    )

    held: Counter[str] = Counter()
    for name, module in built.items():
        for parameter, tensor in module.named_parameters():
            # KV cache scales, one number each, which only a quantized checkpoint brings.
            if not parameter.endswith(("k_scale", "v_scale")):
                held["all"] += tensor.nbytes * COUNTS.get(name, 1)
    ours_all = weight_bytes(SIZES, Layout(tp, fused=False), "mxfp8" if mxfp8 else "bfloat16")
    assert sum(ours_all.values()) == held["all"]


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2], "norm_before_fc": True}},
        {"hidden_size": 3072, "target_hidden_size": 6144, "fc_norm": True, "num_key_value_heads": 2},
        {"draft_vocab_size": 200_001, "bias": True, "num_hidden_layers": 2},
    ],
    ids=["plain", "two states, normed", "of another width", "two layers"],
)
def test_weights_of_a_draft_are_those_of_the_real_class(tp: int, change: dict[str, Any]) -> None:
    given = {**DRAFT, **change}
    rest = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5e6, "rope_scaling": None}
    rope = {"rope_theta": 5e6, "rope_type": "default"}
    config = LlamaConfig(**{**given, **rest, "max_position_embeddings": 4096, "rope_parameters": rope})
    with rank_of(tp):
        built = LlamaForCausalLMEagle3(config)
    held = sum(tensor.nbytes for tensor in built.parameters())
    if given.get("target_hidden_size", given["hidden_size"]) == given["hidden_size"]:
        held -= built.model.embed_tokens.weight.nbytes  # ``set_embed`` replaces it by the target's
    assert draft_weight_bytes(read_draft_sizes(given), tp, 2) == held


def test_published_geometry_is_that_of_transformers() -> None:
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    published: Any = MiniMaxM3VLTextConfig()
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    experts = ("intermediate_size", "dense_intermediate_size", "num_local_experts", "num_experts_per_tok")
    for name in (*same, *experts):
        assert M3_CONFIG[name] == getattr(published, name), name
    sparse = M3_CONFIG["sparse_attention_config"]
    assert sparse["sparse_num_index_heads"] == published.index_n_heads
    assert sparse["sparse_index_dim"] == published.index_head_dim
    assert sparse["sparse_block_size"] == published.index_block_size
    assert sparse["sparse_topk_blocks"] == published.index_topk_blocks


def test_upstream_joins_what_we_join() -> None:
    """The platforms on which index projections are appended to qkv, and what appending does."""
    source = inspect.getsource(minimax_m3.MiniMaxM3Attention.__init__)
    assert (
        "self._fuse_qkv_index_enabled = self.is_sparse_attention_layer and (\n            _is_cuda or _is_hip\n"
        in source
    )
    built = modules(8, False)["sparse attention"]
    built._fuse_qkv_index_enabled = True
    built.maybe_build_fused_qkv_index()
    assert tuple(built.fused_qkv_index_proj.weight.shape) == (1536, 6144)
    with rank_of(8):
        assert (
            minimax_m3.MiniMaxM3SparseForCausalLM.num_fusable_shared_experts(SimpleNamespace(n_shared_experts=1)) == 1
        )


def test_thresholds_of_quick_reduce() -> None:
    theirs = {
        (str(dtype).removeprefix("torch."), ranks): tuple(sizes)
        for (dtype, ranks), sizes in QuickAllReduce._QR_MIN_SIZE.items()
    }
    assert theirs == MIN_BYTES
    assert [QuickReduceRegime[codec].value for codec in CODECS] == [0, 1, 2, 3]
