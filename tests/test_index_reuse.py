"""Index reuse without a server: settings, patterns, the real pools, counters, and what SGLang must still look like."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool  # noqa: E402

from agentserve.cli.launch import command  # noqa: E402
from agentserve.launch.facts import CheckpointFacts  # noqa: E402
from agentserve.launch.plan import index_sources  # noqa: E402
from agentserve.launch.preflight import check_index_reuse  # noqa: E402
from agentserve.launch.recipe import Recipe  # noqa: E402
from agentserve.runtime import sglang_plugin  # noqa: E402
from agentserve.runtime.index_reuse import (  # noqa: E402
    PRODUCERS_VARIABLE,
    REUSE_VARIABLE,
    IndexReuse,
    IndexReuseError,
    parse_index_reuse,
    settings_from,
)
from agentserve.runtime.index_reuse_counters import PathCounts  # noqa: E402
from offload.state import StateError, bytes_per_token, prefix_state_planes, shareable_layers  # noqa: E402
from tests.test_launch_plan import plan  # noqa: E402
from tests.test_sglang_hooks import parameters, target_of  # noqa: E402
from tests.test_state_bytes import BF16, M3  # noqa: E402

M3_SHAREABLE = tuple(range(3, 60))


# --- settings and pattern


@pytest.mark.parametrize("text", ["freq:4", "layers:3,7,11"])
def test_a_setting_survives_its_environment(text: str) -> None:
    reuse = parse_index_reuse(text)
    assert settings_from(reuse.environment()) == reuse
    kept = IndexReuse(reuse.freq, reuse.layers, keep_producers=True)
    assert settings_from(kept.environment()) == kept
    assert settings_from({}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4", "write freq:N"),
        ("freq:", "write freq:N"),
        ("every:4", "write freq:N"),
        ("freq:1", "at least 2"),
        ("freq:2,3", "at least 2"),
        ("layers:7,3", "ascending"),
        ("layers:3,3", "ascending"),
        ("layers:3,x", "write freq:N"),
    ],
)
def test_a_bad_setting_says_what_to_write(text: str, message: str) -> None:
    with pytest.raises(IndexReuseError, match=message):
        parse_index_reuse(text)


def test_a_bad_variable_names_itself() -> None:
    with pytest.raises(IndexReuseError, match=f"{PRODUCERS_VARIABLE}=some"):
        settings_from({REUSE_VARIABLE: "freq:4", PRODUCERS_VARIABLE: "some"})


@pytest.mark.parametrize("freq", [2, 3, 4, 57, 100])
def test_a_frequency_groups_as_sglang_does_on_rocm(freq: int) -> None:
    pattern = IndexReuse(freq=freq).pattern(M3_SHAREABLE)
    group = {layer: place // freq for place, layer in enumerate(M3_SHAREABLE)}
    is_source = {layer: place % freq == 0 for place, layer in enumerate(M3_SHAREABLE)}
    assert pattern.sources == tuple(layer for layer in M3_SHAREABLE if is_source[layer])
    for layer in M3_SHAREABLE:
        source = pattern.source_of[layer]
        assert is_source[source]
        assert group[source] == group[layer]
        assert source <= layer


def test_listed_layers_choose_until_the_next_one() -> None:
    pattern = parse_index_reuse("layers:2,5").pattern((2, 3, 5, 6, 9))
    assert dict(pattern.source_of) == {2: 2, 3: 2, 5: 5, 6: 5, 9: 5}
    assert (pattern.sources, pattern.reusers) == ((2, 5), (3, 6, 9))


@pytest.mark.parametrize(
    ("text", "shareable", "message"),
    [
        ("layers:3,99", M3_SHAREABLE, r"layer 99 chooses no blocks; layers that do: 3\.\.59"),
        ("layers:4,8", M3_SHAREABLE, "layer 3 is the first"),
        ("layers:1,2", (1, 2), "every layer would choose"),
        ("freq:2", (), "no sparse layer"),
        ("freq:2", (5,), "every layer would choose"),
    ],
)
def test_a_pattern_that_does_not_fit_the_model(text: str, shareable: tuple[int, ...], message: str) -> None:
    with pytest.raises(IndexReuseError, match=message):
        parse_index_reuse(text).pattern(shareable)


# --- bytes, against the pools that SGLang would allocate


def bytes_per_slot(pool: Any) -> int:
    slots = pool.size + pool.page_size
    total = sum(pool.get_kv_size_bytes())
    assert total % slots == 0
    return int(total // slots)


def m3_pool(pool_class: type, kv_dtype: torch.dtype, **changes: Any) -> Any:
    """A pool of MiniMax-M3's geometry with few slots."""
    options: dict[str, Any] = {
        "size": 128, "page_size": 128, "dtype": kv_dtype, "index_dtype": torch.bfloat16, "head_num": 4, "head_dim": 128,
        "idx_head_dim": 128, "dense_layer_ids": [0, 1, 2], "sparse_layer_ids": list(M3_SHAREABLE),
        "disable_value_sparse_layer_ids": list(M3_SHAREABLE), "device": "cpu", "start_layer": 0, "end_layer": 60,
        "enable_hisparse": False,
    }  # fmt: skip
    return pool_class(**(options | changes))


@pytest.fixture
def source_pool(monkeypatch: pytest.MonkeyPatch) -> type:
    from agentserve.runtime.sglang_kv_pool import SourceIndexKVPool

    for name, value in IndexReuse(freq=4).environment().items():
        monkeypatch.setenv(name, value)
    return SourceIndexKVPool


@pytest.mark.parametrize(
    ("kv_dtype", "name", "more"),
    [(torch.bfloat16, "bfloat16", 1.07), (torch.float8_e4m3fn, "fp8_e4m3", 1.13)],
    ids=["bf16", "fp8 K/V and bf16 index K"],
)
def test_more_tokens_fit_into_the_same_bytes(
    source_pool: type, kv_dtype: torch.dtype, name: str, more: float, record_property: Any
) -> None:
    off, on = (bytes_per_slot(m3_pool(pool, kv_dtype)) for pool in (MiniMaxSparseKVPool, source_pool))
    budget = 40 * 2**30
    gain = (budget // on) / (budget // off)
    print(f"{name}: {off:,} -> {on:,} bytes a token, {gain:.4f} times the tokens")
    record_property(f"tokens_{name}", gain)
    assert gain >= more
    # What launch's preflight and offload believe is what is allocated.
    types = {"kv_dtype": name, "index_dtype": "bfloat16"}
    sources = IndexReuse(freq=4).pattern(shareable_layers(M3)).sources
    assert bytes_per_token(prefix_state_planes(M3, **types)) == off
    assert bytes_per_token(prefix_state_planes(M3, **types, index_sources=sources)) == on
    assert bytes_per_token(prefix_state_planes(M3, **types, index_topk_freq=4)) == on


def test_the_token_capacity_counts_what_the_pool_allocates(source_pool: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentserve.runtime import sglang_kv_pool

    monkeypatch.setattr(sglang_kv_pool, "m3_fp8_attn_gemm_enabled", lambda _: False)
    monkeypatch.setattr(sglang_kv_pool, "resolving_view", lambda _: None)
    text = SimpleNamespace(**M3["text_config"])
    model = SimpleNamespace(hf_config=SimpleNamespace(architectures=["MiniMaxM3SparseForCausalLM"], text_config=text))
    kvc = SimpleNamespace(
        model_config=model,
        layer_info=SimpleNamespace(start_layer=0, end_layer=60),
        kv_cache_dtype=torch.bfloat16,
        model_dtype=torch.bfloat16,
        server_args=None,
    )
    off, on = (bytes_per_slot(m3_pool(pool, torch.bfloat16)) for pool in (MiniMaxSparseKVPool, source_pool))
    assert sglang_kv_pool.cell_size_of_sources(off, None, kvc, 60) == on
    model.hf_config.architectures = ["LlamaForCausalLMEagle3"]
    assert sglang_kv_pool.cell_size_of_sources(1234, None, kvc, 1) == 1234


def test_a_reuser_keeps_k_and_v_and_nothing_else(source_pool: type) -> None:
    pool = m3_pool(
        source_pool, torch.float32, index_dtype=torch.float32, dense_layer_ids=[0], sparse_layer_ids=[1, 2, 3, 4, 5],
        disable_value_sparse_layer_ids=[1, 2, 3, 4, 5], end_layer=6, head_num=2, head_dim=8, idx_head_dim=8,
    )  # fmt: skip
    assert pool.index_k_layer_id_mapping == {1: 0, 5: 1}
    assert len(pool.index_k_pool.k_buffer) == 2
    where = torch.tensor([130, 7])
    for layer_id in range(1, 6):
        layer = SimpleNamespace(layer_id=layer_id)
        k, v = torch.full((2, 2, 8), float(layer_id)), torch.full((2, 2, 8), -float(layer_id))
        source = layer_id in (1, 5)
        pool.set_fused_kv_index_buffer(
            layer, where, k, v, torch.full((2, 1, 8), 10.0 * layer_id) if source else None, None
        )
    for layer_id in range(1, 6):
        keys, values = pool.get_kv_buffer(layer_id)
        assert keys[where].eq(layer_id).all()
        assert values[where].eq(-layer_id).all()
        index = pool.get_index_k_buffer(layer_id)
        assert index.shape[0] == (256 if layer_id in (1, 5) else 0)
    assert pool.get_index_k_buffer(5)[where].eq(50).all()
    with pytest.raises(ValueError, match="not in the K-only"):
        pool.set_index_k_buffer(SimpleNamespace(layer_id=3), where, torch.zeros(2, 1, 8))


def test_hisparse_is_refused(source_pool: type) -> None:
    with pytest.raises(IndexReuseError, match="HiSparse"):
        m3_pool(source_pool, torch.bfloat16, enable_hisparse=True)


def test_planes_refuse_sources_that_choose_nothing() -> None:
    with pytest.raises(StateError, match="choose no blocks"):
        prefix_state_planes(M3, **BF16, index_sources=(1, 3))
    with pytest.raises(StateError, match="not both"):
        prefix_state_planes(M3, **BF16, index_sources=(3,), index_topk_freq=4)


# --- counters


def test_counts_follow_what_layers_did_and_are_published_as_growth() -> None:
    from prometheus_client import REGISTRY

    def published(event: str, layer: str, mode: str) -> float:
        return REGISTRY.get_sample_value(f"agentserve_index_{event}_total", {"layer": layer, "mode": mode}) or 0.0

    counts = PathCounts([3, 4, 5], "cpu", publish=True)
    before = published("selections_reused", "4", "decode")

    def decode() -> None:
        counts.passed(3, ("computed",), "decode")
        counts.passed(4, ("reused", "skipped"), "decode")
        counts.passed(5, ("reused",), "decode")

    decode()
    decode()
    counts.publish(now=10.0)
    assert published("selections_reused", "4", "decode") - before == 2
    assert published("producers_skipped", "5", "decode") == 0
    counts.passed(3, ("computed",), "verify")
    counts.passed(4, ("reused", "skipped"), "verify")
    counts.passed(5, ("computed",), "verify")
    counts.publish(now=10.5)
    assert published("selections_computed", "5", "verify") == 0, "published more than once a second"
    counts.publish(now=11.1)
    assert published("selections_computed", "5", "verify") == 1
    assert published("selections_reused", "4", "decode") - before == 2


# --- what launch makes of it


def test_launch_carries_the_setting() -> None:
    made = plan(index_reuse="freq:4")
    assert made.env[REUSE_VARIABLE] == "freq:4"
    assert made.env[PRODUCERS_VARIABLE] == "skip"
    off = plan()
    assert REUSE_VARIABLE in off.unset
    assert not any("INDEX" in name for name in off.env)


def test_rocm_gets_sglangs_own_switch() -> None:
    made = plan(device="rocm", kv={"memory_fraction": 0.8}, index_reuse="freq:4")
    assert made.env["SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ"] == "4"
    assert REUSE_VARIABLE not in made.env
    with pytest.raises(ValueError, match="freq:N"):
        Recipe.model_validate({"model": "m", "device": "rocm", "index_reuse": "layers:3,7"})


def test_preflight_compares_the_setting_with_the_checkpoint() -> None:
    facts = CheckpointFacts(Path("m"), M3, (), (), 0)
    fits = Recipe.model_validate({"model": "m", "device": "cuda", "index_reuse": "freq:4"})
    assert list(check_index_reuse(fits, facts)) == []
    assert index_sources(fits, facts) == tuple(range(3, 60, 4))
    (finding,) = check_index_reuse(fits.model_copy(update={"index_reuse": "layers:3,99"}), facts)
    assert finding.level == "error"
    assert "layer 99 chooses no blocks" in finding.what
    own = Recipe.model_validate({"model": "m", "device": "rocm", "index_reuse": "freq:4"})
    assert index_sources(own, facts) is None, "SGLang's own sharing leaves every layer its index keys"


@pytest.mark.parametrize(
    ("device", "extra_args", "named"),
    [
        ("cuda", ["--pp-size=2"], "--pp-size"),
        ("cuda", ["--pipeline-parallel-size", "4"], "--pipeline-parallel-size"),
        ("cuda", ["--pp-size", "1"], None),
        ("rocm", ["--pp-size=2"], None),  # there it is SGLang's own
        ("rocm", ["--enable-two-batch-overlap"], "--enable-two-batch-overlap"),
        ("cuda", ["--enable-hisparse"], "--enable-hisparse"),
        ("cuda", ["--log-level=debug"], None),
    ],
)
def test_preflight_refuses_what_sharing_does_not_run_with(
    device: str, extra_args: list[str], named: str | None
) -> None:
    facts = CheckpointFacts(Path("m"), M3, (), (), 0)
    fields = {"model": "m", "device": device, "extra_args": extra_args}
    found = list(check_index_reuse(Recipe.model_validate({**fields, "index_reuse": "freq:4"}), facts))
    assert [finding.level for finding in found] == (["error"] if named else [])
    assert named is None or f"does not run with {named}: " in found[0].what
    assert list(check_index_reuse(Recipe.model_validate(fields), facts)) == []


def test_a_dry_run_shows_the_setting_and_the_smaller_prefix(tiny_checkpoint: Path) -> None:
    def shown(*options: str) -> str:
        result = CliRunner().invoke(command, ["tiny-cpu", "--model", str(tiny_checkpoint), "--dry-run", *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert REUSE_VARIABLE not in shown().replace(f"-u {REUSE_VARIABLE}", "")
    on = shown("--index-reuse", "layers:1,4")
    assert f"{REUSE_VARIABLE}=layers:1,4" in on
    (row,) = [line for line in on.splitlines() if "index-K" in line]
    # two layers of one head of 32 float32 elements
    assert re.findall(r"\d+", row.partition("float32")[2]) == ["2", "1", "32", "256"]
    refused = CliRunner().invoke(command, ["tiny-cpu", "--model", str(tiny_checkpoint), "--index-reuse", "layers:2,4"])
    assert refused.exit_code == 2
    assert "layer 1 is the first" in refused.output


# --- the seams


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (
            "sglang.srt.models.minimax_m3.MiniMaxM3Attention.__init__",
            [
                "self", "config", "layer_id", "quant_config", "prefix", "is_sparse_attention_layer",
                "disable_index_value",
            ],
        ),
        ("sglang.srt.models.minimax_m3.MiniMaxM3SparseForCausalLM.load_weights", ["self", "weights"]),
        ("sglang.srt.models.minimax_m3_vl.MiniMaxM3SparseForConditionalGeneration.load_weights", ["self", "weights"]),
        (
            "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
            ["self", "kvc", "num_layers"],
        ),
        (
            "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.set_fused_kv_index_buffer",
            [
                "self", "layer", "loc", "cache_k", "cache_v", "cache_idx_k", "cache_idx_v", "k_scale", "v_scale",
                "idx_k_scale", "idx_v_scale",
            ],
        ),
        (
            "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.forward",
            ["self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"],
        ),
        (
            "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend.init_forward_metadata_out_graph",
            ["self", "forward_batch", "in_capture"],
        ),
    ],
)  # fmt: skip
def test_what_we_override_or_wrap_is_still_there(target: str, names: list[str]) -> None:
    assert [name for name, _ in parameters(target_of(target))] == names


def test_sglang_still_shares_on_rocm_only_and_through_the_fields_we_set() -> None:
    """A hook whose reason is gone should go too; and a field that moved must not be set in vain."""
    import inspect

    from sglang.srt.layers.attention import minimax_sparse_backend as upstream
    from sglang.srt.models import minimax_m3

    source = inspect.getsource(upstream)
    assert "if is_hip() and is_gfx95_supported() and not is_tbo_enabled()" in source
    for used in (
        "self._topk_is_source[layer.layer_id]", "self._topk_group_of_layer[layer.layer_id]",
        "self._decode_topk_buf.get(q.shape[0])", "self._topk_cache_owner is not forward_batch",
        "self._idx_group_size", "_use_reuse = self.index_cache_enabled",
    ):  # fmt: skip
        assert used in source, used
    model = inspect.getsource(minimax_m3)
    assert "is_sparse_attention_layer=is_sparse_attention_layer," in model, "no longer given by keyword"
    assert "layer_id=layer_id," in model


def test_every_hook_resolves_and_says_why() -> None:
    both = sglang_plugin.index_reuse_hooks(IndexReuse(freq=4))
    assert len(sglang_plugin.index_reuse_hooks(IndexReuse(freq=4, keep_producers=True))) == 1
    for hook in both:
        assert callable(target_of(hook.target))
        assert len(hook.reason) > 20


@pytest.mark.parametrize(
    ("environment", "hooks"),
    [
        ({}, 0),
        (IndexReuse(freq=4).environment(), 7),
        (IndexReuse(freq=4, separate_store=True).environment(), 6),
        (IndexReuse(freq=4, keep_producers=True).environment(), 1),
    ],
    ids=["off", "on", "separate store", "selection only"],
)
def test_nothing_is_registered_unless_asked_for(
    environment: dict[str, str], hooks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    for name in [name for name in os.environ if name.startswith(("AGENTSERVE_", "SGLANG_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))  # registered, never applied
    sglang_plugin.register()
    assert len(HookRegistry._hooks) == hooks
