"""Local shapes and bytes: the arithmetic against published numbers, real files and the definition."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.cli.shapes import command
from agentserve.shapes.budget import capacity_tokens, communication, weight_bytes
from agentserve.shapes.draft import draft_weight_bytes, read_draft_sizes
from agentserve.shapes.linears import Layout, Linear, local_linears, padded_vocab
from agentserve.shapes.model import ShapeError, read_sizes
from agentserve.shapes.published import M3_CONFIG
from agentserve.shapes.quick_reduce import min_message_bytes
from agentserve.shapes.report import Setup, shape_report

M3 = read_sizes(M3_CONFIG)
FREQ_4 = tuple(range(3, 60, 4))


def by_name(layout: Layout) -> dict[str, Linear]:
    return {linear.name: linear for linear in local_linears(M3, layout)}


def test_fused_qkv_at_tp8_is_1536_wide() -> None:
    """64 query heads shard to 8, four KV and four index heads replicate to 1, the index key is one head."""
    linear = by_name(Layout(8))["qkv + index q/k"]
    assert (linear.n, linear.k, len(linear.layers)) == (1536, 6144, 57)
    assert linear.n != (64 + 4 + 4 + 4 + 1) * 128 // 8


def test_apart_and_together_are_the_same_columns() -> None:
    for tp in (1, 2, 4, 8, 16):
        apart, joined = by_name(Layout(tp, fused=False)), by_name(Layout(tp))
        assert apart["qkv"].n + apart["index q/k"].n == joined["qkv + index q/k"].n
        assert apart["qkv"].n == joined["qkv"].n
        assert len(apart["qkv"].layers) == 60


def test_the_shared_expert_joins_the_routed_ones() -> None:
    apart, joined = by_name(Layout(4, fused=False)), by_name(Layout(4))
    assert (joined["experts w1/w3"].copies, joined["experts w1/w3"].active) == (129, 5)
    assert (apart["experts w1/w3"].copies, apart["experts w1/w3"].active) == (128, 4)
    assert apart["shared expert w1/w3"].n == joined["experts w1/w3"].n == 1536
    assert "shared expert w1/w3" not in joined


def test_layers_that_reuse_a_selection_multiply_by_qkv_alone() -> None:
    linears = by_name(Layout(8, index_sources=FREQ_4))
    assert linears["qkv + index q/k"].layers == FREQ_4
    assert len(linears["qkv"].layers) == 45


def test_index_values_widen_the_projection_and_need_one_more() -> None:
    config = copy.deepcopy(M3_CONFIG)
    config["sparse_attention_config"]["sparse_disable_index_value"] = [0] * 10 + [1] * 50
    linears = {linear.name: linear for linear in local_linears(read_sizes(config), Layout(8))}
    assert linears["qkv + index q/k/v"].layers == tuple(range(3, 10))
    assert linears["qkv + index q/k/v"].n == 1536 + 128
    assert (linears["index o"].k, linears["index o"].n) == (128, 6144)


@given(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), st.booleans())
def test_ranks_together_hold_every_column_and_replicated_heads_more_than_once(tp: int, fused: bool) -> None:
    one, many = by_name(Layout(1, fused)), by_name(Layout(tp, fused))
    for name, linear in many.items():
        whole, parts = one[name].n * one[name].k, linear.n * linear.k * tp
        if name == "router":
            assert parts == whole * tp
        elif name in ("qkv", "qkv + index q/k", "index q/k"):
            extra = 2 * (max(4, tp) - 4) if "qkv" in name else 0
            extra += (max(4, tp) - 4) + (tp - 1) if "index" in name else 0
            assert parts == whole + extra * 128 * 6144
        elif name == "LM head":
            assert linear.n * tp == padded_vocab(M3, tp) >= M3.vocab_size
        else:
            assert parts == whole


def test_rows_of_a_routed_expert_are_the_mean() -> None:
    experts = by_name(Layout(8))["experts w2"]
    assert experts.m(tokens=129, sequences=1) == 5
    assert by_name(Layout(8))["LM head"].m(tokens=8192, sequences=3) == 3


def test_weights_are_those_of_a_real_checkpoint(tiny_checkpoint: Path) -> None:
    sizes = read_sizes(json.loads((tiny_checkpoint / "config.json").read_text()))
    stored = 0
    for shard in tiny_checkpoint.glob("*.safetensors"):
        with safe_open(shard, framework="np") as file:
            stored += sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert sum(weight_bytes(sizes, Layout(1, fused=False), "float32").values()) == stored
    assert sum(weight_bytes(sizes, Layout(1, fused=True), "float32").values()) == stored


def test_mxfp8_keeps_router_and_vocabulary_in_16_bits() -> None:
    plain, quantized = (weight_bytes(M3, Layout(8), dtype) for dtype in ("bfloat16", "mxfp8"))
    for part in ("router", "LM head", "embedding", "norms"):
        assert plain[part] == quantized[part]
    for part in ("attention", "experts", "dense MLP"):
        assert quantized[part] * 64 == plain[part] * 33


def test_decode_messages_of_128_sequences_are_below_the_quantized_all_reduce() -> None:
    """The seeds' example: 1.5 MiB, where INT4 on four ranks starts at 2 MiB, or at 16 MiB without the cast to fp16."""
    sent = communication(M3, 4, activation_bytes=2)
    assert 128 * sent.message_bytes == 1.5 * 2**20
    assert (sent.all_reduces, sent.ring_factor) == (121, 1.5)
    assert min_message_bytes("INT4", 4) == 2 * 2**20 > 128 * sent.message_bytes
    assert min_message_bytes("INT4", 4, cast_to_fp16=False) == 16 * 2**20
    assert min_message_bytes("INT4", 3) is None
    assert min_message_bytes("NONE", 4) is None
    assert communication(M3, 1, 2).bytes_per_token == 0


def setup(**changes: Any) -> Setup:
    values: dict[str, Any] = {
        "tp": 1,
        "fused": True,
        "activation": "bfloat16",
        "weights": ("bfloat16", "mxfp8"),
        "caches": (("bfloat16", "bfloat16"), ("fp8_e4m3", "bfloat16")),
        "index_sources": None,
        "compared_sources": FREQ_4,
    }
    return Setup(**{**values, **changes})


def test_index_reuse_fits_more_tokens_into_the_same_bytes() -> None:
    bf16, fp8 = shape_report(M3_CONFIG, setup()).caches
    assert bf16.total == 122_880 + 14_592
    assert bf16.reuse_gain == (122_880 + 14_592) / (122_880 + 15 * 256) > 1.07
    assert fp8.reuse_gain == (61_440 + 14_592) / (61_440 + 15 * 256) > 1.13
    # K/V heads shard, index keys do not: the more ranks, the more reuse is worth.
    gains = [shape_report(M3_CONFIG, setup(tp=tp)).caches[0].reuse_gain for tp in (1, 2, 4, 8)]
    assert gains == sorted(gains)
    assert gains[2] == gains[3] == 45_312 / 34_560


def test_capacity_is_what_weights_leave_in_whole_pages() -> None:
    report = shape_report(M3_CONFIG, setup(tp=8, memory_bytes=120e9))
    weights = report.weights["bfloat16"]
    tokens = report.caches[0].tokens["bfloat16"]
    assert tokens % 128 == 0
    left = 120e9 - sum(weights.values()) - tokens * report.caches[0].total
    assert 0 <= left < 128 * report.caches[0].total
    assert report.caches[0].tokens["mxfp8"] > tokens
    # Layers that reuse hold no index projections either.
    assert report.caches[0].reuse_tokens["bfloat16"] > tokens * report.caches[0].reuse_gain
    assert capacity_tokens(-1.0, 100, 128) == 0


# A draft of M3's sizes, with heads of its own.
DRAFT = {
    "hidden_size": 6144, "num_hidden_layers": 1, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12_288, "vocab_size": 200_064, "draft_vocab_size": 32_000,
}  # fmt: skip


def test_a_draft_takes_planes_and_memory() -> None:
    without, with_draft = (
        shape_report(M3_CONFIG, setup(tp=8, memory_bytes=120e9, draft_config=draft)) for draft in (None, DRAFT)
    )
    assert with_draft.caches[0].total == 45_312 + 2 * 128 * 2
    # Joined hidden states (whole), q, k and v of twice the width, o, the MLP, four norms, the LM head; no embedding.
    elements = 6144 * (3 * 6144 + 8 * 128 * 2 + 6 * 128 + 3 * 1536 + 4 + 4000)
    for dtype in ("bfloat16", "mxfp8"):
        assert with_draft.weights[dtype]["EAGLE3 draft"] == 2 * elements
        assert "EAGLE3 draft" not in without.weights[dtype]
    left = 120e9 - sum(with_draft.weights["bfloat16"].values())
    assert with_draft.caches[0].tokens["bfloat16"] == capacity_tokens(left, with_draft.caches[0].total, 128)


def test_the_weights_of_a_draft_are_those_of_its_file(tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path / "draft")
    sizes = read_draft_sizes(json.loads((folder / "config.json").read_text()))
    with safe_open(folder / "model.safetensors", framework="np") as file:
        stored = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    tables = stored.pop("d2t") + stored.pop("t2d")  # which token is which, no weights
    assert tables > 0
    assert draft_weight_bytes(sizes, 1, 4) == sum(stored.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": None}, "EAGLE3 draft: config field 'intermediate_size': field required"),
        ({"num_attention_heads": 0}, "config field 'num_attention_heads': input should be greater"),
        ({"num_attention_heads": 12}, "the draft's num_attention_heads=12 cannot be split over tp=8"),
        ({"num_key_value_heads": 3}, "the draft's num_key_value_heads=3 cannot be split over or replicated"),
        ({"eagle_config": []}, "config field 'eagle_config'"),
    ],
)
def test_a_faulty_draft_names_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        draft_weight_bytes(read_draft_sizes({**DRAFT, **change}), 8, 2)


@pytest.mark.parametrize(
    ("tp", "field"), [(3, "num_attention_heads=64"), (0, "tp must be at least 1"), (128, "num_attention_heads=64")]
)
def test_a_split_that_does_not_work_names_the_field(tp: int, field: str) -> None:
    with pytest.raises(ShapeError, match=field):
        local_linears(M3, Layout(tp))


def test_faulty_configs_name_the_field() -> None:
    config = copy.deepcopy(M3_CONFIG)
    del config["num_local_experts"]
    config["sparse_attention_config"]["sparse_index_dim"] = 0
    with pytest.raises(ShapeError, match=r"'sparse_attention_config.sparse_index_dim'.*|'num_local_experts'") as error:
        read_sizes(config)
    assert "num_local_experts" in str(error.value)
    with pytest.raises(ShapeError, match="moe_layer_freq lists 60 layers, num_hidden_layers is 61"):
        read_sizes({**M3_CONFIG, "num_hidden_layers": 61})
    with pytest.raises(ShapeError, match="known types: float32"):
        weight_bytes(M3, Layout(8), "mxfp4")


def test_nested_text_config_is_read_too() -> None:
    text = {name: value for name, value in M3_CONFIG.items() if name != "sparse_attention_config"}
    nested = {"text_config": text, "sparse_attention_config": M3_CONFIG["sparse_attention_config"]}
    assert read_sizes(nested) == M3


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, list(arguments), env={"COLUMNS": "140"})


def test_command_prints_shapes_of_a_recipe_without_its_checkpoint() -> None:
    result = run("m3-mi355x", "--tp", "8", "--memory", "288")
    assert result.exit_code == 0, result.output
    (row,) = [line for line in result.stdout.splitlines() if "qkv + index q/k" in line]
    assert "1,536" in row
    assert "published geometry" in result.stdout
    assert "1.50 MiB at 128" in result.stdout
    assert "INT4 171" in result.stdout


def test_command_gives_the_same_as_json() -> None:
    answer = orjson.loads(run("m3-h200", "--tp", "4", "--index-reuse", "freq:4", "--json").stdout)
    names = {linear["name"]: linear for linear in answer["linears"]}
    assert names["qkv + index q/k"]["layers"] == list(FREQ_4)
    assert names["qkv + index q/k"]["n"] == 2560
    assert answer["communication"]["bytes_per_token"] == 121 * 12_288
    assert answer["cache_bytes_per_token"][0]["planes"]["index-K"] == 14_592


def test_command_reads_a_real_checkpoint(tiny_checkpoint: Path) -> None:
    answer = orjson.loads(run("tiny-cpu", "--model", str(tiny_checkpoint), "--json").stdout)
    assert {linear["name"]: linear["n"] for linear in answer["linears"]}["index q/k"] == 96
    assert list(answer["weight_bytes"]) == ["float32"]


def test_command_counts_the_planes_of_a_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DRAFT))
    answer = orjson.loads(run("m3-h200", "--tp", "4", "--eagle3", str(tmp_path), "--json").stdout)
    assert answer["cache_bytes_per_token"][0]["planes"]["draft-K"] == 2 * 128 * 2
    assert answer["weight_bytes"]["bfloat16"]["EAGLE3 draft"] > 0


def test_command_says_that_weights_do_not_fit() -> None:
    result = run("m3-h200", "--tp", "8", "--memory", "80", "--fraction", "0.9")
    assert result.exit_code == 0, result.output
    assert "beside the weights in 72.0 GiB (77.31 GB)" in result.stdout
    assert "weights in bfloat16 do not fit: 106.84 GB a rank; take more ranks (--tp)" in result.stdout
    assert "weights in mxfp8 do not fit" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m3-h200", "--tp", "3"], "num_attention_heads=64"),
        (["m3-h200", "--model", "nobody/nothing"], "no folder and not in the Hugging Face cache"),
        (["m3-h200", "--set", "kv.memory_fraction=null", "--memory", "141"], "pass --fraction"),
        (["m3-h200", "--set", "extra_args=[--ep-size, 8]"], "tensor parallelism only"),
        (["m3-h200", "--index-reuse", "4"], "write freq:N"),
    ],
)
def test_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
