"""Which kernel ran: notes of what SGLang calls, one count a pass, and what SGLang must still look like."""

from __future__ import annotations

import inspect
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402

from agentserve.audit import kernels  # noqa: E402
from agentserve.launch.plan import make_plan  # noqa: E402
from agentserve.launch.recipe import Recipe  # noqa: E402
from agentserve.runtime import sglang_kernel_counters, sglang_msa, sglang_plugin  # noqa: E402
from agentserve.runtime.kernel_counters import KERNELS, KernelCounts  # noqa: E402
from tests.test_sglang_hooks import parameters, target_of  # noqa: E402

SPARSE = (3, 4, 5)


def passes(**labels: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("agentserve_sparse_attention_passes_total", labels) or 0.0


def reduced(mode: str) -> float:
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("agentserve_quick_reduce_passes_total", {"mode": mode}) or 0.0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> KernelCounts:
    """Of this process, as ``start`` makes them in SGLang's."""
    made = KernelCounts(SPARSE, "cpu", publish=True)
    monkeypatch.setattr(sglang_kernel_counters, "_counts", made)
    return made


def run_pass(layer_calls: Any, mode: str = "decode", layers: tuple[int, ...] = SPARSE) -> None:
    """Sparse layers of a pass through the real hook; ``layer_calls(layer)`` is what SGLang's ``forward`` would do."""
    forward_mode = SimpleNamespace(
        is_idle=lambda: mode == "idle", is_decode=lambda: mode == "decode", is_target_verify=lambda: mode == "verify"
    )
    batch = SimpleNamespace(forward_mode=forward_mode)
    for layer in layers:
        sglang_kernel_counters.count_pass(
            lambda *arguments: layer_calls(arguments[4].layer_id), None, 0, 0, 0, SimpleNamespace(layer_id=layer), batch
        )


def test_a_pass_counts_once_by_the_kernel_that_ran_in_it(counts: KernelCounts) -> None:
    before = {kernel: passes(kernel=kernel, mode="decode") for kernel in KERNELS}
    triton, msa = sglang_kernel_counters.noting("triton"), sglang_kernel_counters.noting("msa")
    for _ in range(3):
        run_pass(lambda _: triton(lambda: None))
    run_pass(lambda _: msa(lambda: None))
    run_pass(lambda _: None)  # a kernel that nobody notes is credited to none
    run_pass(lambda _: triton(lambda: None), mode="idle")
    counts.publish(now=10.0)
    grown = {kernel: passes(kernel=kernel, mode="decode") - before[kernel] for kernel in KERNELS}
    assert grown == {"triton": 3, "msa": 1, "aiter": 0, "trtllm": 0, "torch": 0}


def test_a_kernel_that_gives_up_is_not_credited(counts: KernelCounts) -> None:
    before = passes(kernel="msa", mode="extend"), passes(kernel="triton", mode="extend")
    msa, triton = sglang_kernel_counters.noting("msa"), sglang_kernel_counters.noting("triton")

    def gives_up() -> None:
        raise RuntimeError("MSA is not available")

    def falls_back(_: int) -> None:
        with pytest.raises(RuntimeError):
            msa(gives_up)
        triton(lambda: None)

    run_pass(falls_back, mode="extend")
    counts.publish(now=10.0)
    after = passes(kernel="msa", mode="extend"), passes(kernel="triton", mode="extend")
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)


def test_the_torch_kernel_is_seen_by_its_own_count(counts: KernelCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_msa, "executed", type(sglang_msa.executed)())
    before = passes(kernel="torch", mode="verify")
    run_pass(lambda _: sglang_msa.executed.update(attend_decode=1), mode="verify")
    counts.publish(now=10.0)
    assert passes(kernel="torch", mode="verify") - before == 1


def test_reductions_behind_the_last_layer_are_not_the_next_passs(counts: KernelCounts) -> None:
    """A large prefill message is quantized, the small ones of the decode step after it are not."""
    codec = {name: SimpleNamespace(qr_quant_level=SimpleNamespace(name=name)) for name in ("INT4", "FP")}

    def reduce(level: str) -> None:
        assert sglang_kernel_counters.note_reduction(lambda self, message: message, codec[level], 7) == 7

    before = reduced("extend"), reduced("decode")
    run_pass(lambda _: reduce("INT4"), mode="extend")
    reduce("INT4")  # the last layer's MLP
    run_pass(lambda _: None)
    run_pass(lambda _: reduce("FP"))  # QuickReduce without a codec sends 16 bits
    counts.publish(now=10.0)
    assert (reduced("extend") - before[0], reduced("decode") - before[1]) == (1, 0)


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_every_function_that_is_noted_is_there(hip: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    hooks = sglang_plugin._gpu_kernel_hooks()
    assert len(hooks) == (4 if hip else 5)
    for hook in hooks:
        assert inspect.isfunction(target_of(hook.target)), hook.target
        assert len(hook.reason) > 20


def test_a_cpu_hooks_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "agentserve_cpu")
    targets = [hook.target.rpartition(".")[2] for hook in sglang_plugin.kernel_hooks()]
    assert targets == ["__init__", "init_forward_metadata_out_graph", "forward"]


def test_upstream_calls_what_is_noted_where_we_look_for_it() -> None:
    from sglang.srt.distributed import parallel_state
    from sglang.srt.distributed.device_communicators.quick_all_reduce import QuickReduceRegime
    from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse

    prefill, decode = (
        inspect.getsource(target_of(f"{minimax_sparse.__name__}.minimax_sparse_{phase}"))
        for phase in ("prefill", "decode")
    )
    for name in ("flash_prefill_with_gqa_share_sparse(", "msa_sparse_prefill_main(", "gluon_sparse_prefill("):
        assert name in prefill
    for name in ("flash_decode_with_gqa_share_sparse(", "msa_sparse_decode_main(", "dense_main_attn_fn("):
        assert name in decode
    assert QuickReduceRegime.FP.value == 0
    chosen = inspect.getsource(parallel_state.GroupCoordinator)
    assert "self.qr_comm.should_quick_allreduce(input_)" in chosen
    assert "qr_comm.quick_all_reduce(input_)" in chosen
    backend = "sglang.srt.layers.attention.minimax_sparse_backend.MiniMaxSparseAttnBackend"
    assert [name for name, _ in parameters(target_of(f"{backend}.forward"))][:6] == [
        "self", "q", "k", "v", "layer", "forward_batch",
    ]  # fmt: skip


def test_the_audit_reads_the_same_names() -> None:
    assert kernels._KERNELS == KERNELS


def test_a_plain_launch_on_a_gpu_only_looks_on(counts: KernelCounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a feature SGLang computes what it does without us: nothing is replaced, results pass through."""
    made = make_plan(
        Recipe.model_validate({"model": "m", "device": "cuda", "page_size": 128}), None, model="m", cwd=Path("/")
    )
    for name in [name for name in os.environ if name.startswith(("AGENTSERVE_", "SGLANG_"))]:
        monkeypatch.delenv(name)
    for name, value in made.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))  # registered, never applied
    sglang_plugin.register()
    hooks = {
        target: [(kind.value, function) for kind, function, _ in put] for target, put in HookRegistry._hooks.items()
    }
    facts = {hook.target for hook in (*sglang_plugin.server_fact_hooks(), *sglang_plugin.kernel_hooks())}
    assert set(hooks) == facts
    assert {kind for put in hooks.values() for kind, _ in put} == {"after", "around"}
    result, given = object(), (object(), object())

    def original(*arguments: object, **named: object) -> object:
        assert (arguments[-2:], named) == (given, {"more": 1})
        return result

    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True, is_target_verify=lambda: False)
    layer, batch = SimpleNamespace(layer_id=4), SimpleNamespace(forward_mode=mode)
    assert sglang_kernel_counters.count_pass(original, None, 0, 0, 0, layer, batch, *given, more=1) is result
    assert sglang_kernel_counters.noting("triton")(original, *given, more=1) is result
    codec = SimpleNamespace(qr_quant_level=SimpleNamespace(name="INT4"))
    assert sglang_kernel_counters.note_reduction(original, codec, *given, more=1) is result
