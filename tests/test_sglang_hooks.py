"""Our hooks against the installed SGLang: each target exists and still has the shape we checked."""

from __future__ import annotations

import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points, version
from typing import Any

import pytest

from agentserve.runtime import sglang_cpu_platform, torchvision_operators

torchvision_operators.declare()

from agentserve.runtime import sglang_msa, sglang_plugin  # noqa: E402


def test_torchvision_imports_whatever_torch_its_binary_was_built_for() -> None:
    """In a process of its own: defining an operator a second time ends the process."""
    code = (
        "from agentserve.runtime import torchvision_operators as ours; ours.declare(); ours.declare()\n"
        "import torch, torchvision; assert torch.ops.torchvision.nms"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def target_of(path: str) -> Callable[..., Any]:
    owner, _, name = path.rpartition(".")
    target: Callable[..., Any] = inspect.unwrap(getattr(pkgutil.resolve_name(owner), name))
    return target


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    return [(name, p.default) for name, p in inspect.signature(function).parameters.items()]


def test_the_version_is_the_one_the_hooks_were_checked_against() -> None:
    assert version("sglang") == sglang_plugin.CHECKED_VERSION


@pytest.mark.parametrize(
    ("target", "ours"),
    [
        ("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse.minimax_sparse_prefill", sglang_msa.prefill),
        ("sglang.srt.layers.attention.minimax_sparse_ops.minimax_sparse.minimax_sparse_decode", sglang_msa.decode),
    ],
)
def test_replaced_functions_have_our_signature(target: str, ours: Callable[..., Any]) -> None:
    assert parameters(target_of(target)) == parameters(ours)


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_token_to_kv_pool",
            ["self", "sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"],
        ),
        (
            "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_minimax_sparse_kv_pool",
            ["self", "max_total_num_tokens"],
        ),
        (
            "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
            ["layer", "x", "topk_output", "moe_runner_config"],
        ),
        ("sglang.srt.models.minimax_m3.MiniMaxM3MoE._compute_router_logits", ["self", "hidden_states"]),
        ("sglang.srt.layers.moe.fused_moe_native.swiglu_gpt_oss_sigmoid_alpha", ["x", "gemm1_alpha", "gemm1_limit"]),
        (
            "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe.swiglu_no_interleaved_with_alpha_and_limit",
            ["x", "gemm1_alpha", "gemm1_limit"],
        ),
    ],
)
def test_wrapped_functions_take_the_arguments_we_rely_on(target: str, names: list[str]) -> None:
    assert [name for name, _ in parameters(target_of(target))] == names


def test_every_hook_of_the_table_resolves_and_says_why() -> None:
    for hook in sglang_plugin.cpu_hooks():
        assert callable(target_of(hook.target))
        assert hook.kind in ("around", "replace")
        assert len(hook.reason) > 20


def test_upstream_still_needs_the_hooks() -> None:
    """A hook whose reason is gone should go too."""
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    assert "gate_up_interleaved" not in inspect.getsource(fused_moe_native)
    pool = inspect.getsource(KVCacheConfigurator._build_token_to_kv_pool)
    assert 'subsystem="the MiniMax sparse-index KV pool"' in pool


def test_the_dense_backend_overrides_what_upstream_calls() -> None:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from agentserve.runtime.sglang_dense import DenseTorchAttnBackend

    ours = DenseTorchAttnBackend._run_sdpa_forward_extend
    assert parameters(ours) == parameters(TorchNativeAttnBackend._run_sdpa_forward_extend)


def test_entry_points_lead_to_us(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {e.name: e for e in entry_points(group="sglang.srt.plugins")}
    assert plugins["agentserve"].load() is sglang_plugin.register
    platforms = {e.name: e for e in entry_points(group="sglang.srt.platforms")}
    activate = platforms[sglang_cpu_platform.PLATFORM_NAME].load()
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None  # never chosen on its own: a GPU machine must not fall to the CPU
    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu_platform.PLATFORM_NAME)
    qualified = activate()
    from sglang.srt.platforms.interface import SRTPlatform

    assert issubclass(pkgutil.resolve_name(qualified), SRTPlatform)


def test_a_hook_that_could_not_be_applied_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs it; without the hooks the numbers would be silently wrong."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    monkeypatch.setenv("SGLANG_PLATFORM", sglang_cpu_platform.PLATFORM_NAME)
    applied = set(HookRegistry._patched)
    try:
        HookRegistry._patched.clear()
        with pytest.raises(RuntimeError, match=r"not in place.*minimax_sparse_prefill"):
            sglang_plugin.require_applied()
        monkeypatch.setenv("AGENTSERVE_EAGLE3", "real")
        with pytest.raises(RuntimeError, match=r"minimax_sparse_prefill.*create_tree_cache.*verify_tree_greedy"):
            sglang_plugin.require_applied()
        monkeypatch.delenv("SGLANG_PLATFORM")
        with pytest.raises(RuntimeError, match=r"not in place: sglang.srt.mem_cache.registry.create_tree_cache"):
            sglang_plugin.require_applied()
    finally:
        HookRegistry._patched.update(applied)
