"""Attention kernels, CUDA graphs and the quantized all-reduce."""

from __future__ import annotations

from agentserve.audit.counters import ATTENTION_PASSES, GRAPH_PASSES, QUICK_REDUCE_PASSES, Metrics
from agentserve.audit.facts import NOT_REPORTED, Facts
from agentserve.audit.row import AuditRow
from agentserve.shapes.budget import communication
from agentserve.shapes.quick_reduce import CODECS, min_message_bytes

_KERNELS = ("aiter", "msa", "trtllm", "triton", "torch")  # as agentserve/runtime/kernel_counters.py names them
_MSA_BLOCK = 128
_MSA_TOPK = (4, 8, 16, 32)
_MSA_ARCHITECTURES = ("sm_100", "sm_103")
_CODEC_VARIABLE = "ROCM_QUICK_REDUCE_QUANTIZATION"
_CAST_VARIABLE = "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"
_CUSTOM_VARIABLE = "SGLANG_M3_ALLOW_CUSTOM_AR"


def msa_kernel(facts: Facts, metrics: Metrics) -> AuditRow:
    """NVIDIA's MSA kernel (fmha_sm100); else sparse attention runs in Triton, on a CPU in torch."""
    off = facts.switch("SGLANG_DISABLE_MSA", False)
    configured = None if off is None else not off
    setting = "on unless SGLANG_DISABLE_MSA is set" + (f": {NOT_REPORTED}" if off is None else "")
    return AuditRow(
        "MSA kernel",
        configured,
        setting,
        *_can_run_msa(facts),
        *_passes_of(metrics, "msa", "the server's log says main_attn=MSA or triton at its start"),
    )


def _passes_of(metrics: Metrics, kernel: str, instead: str) -> tuple[float | None, str]:
    """Passes in which a kernel attended in the sparse layers, and which ones did in all."""
    total = metrics.total(ATTENTION_PASSES)
    if total is None:
        return None, f"nothing counts it, since agentserve did not launch this server: {instead}"
    ran = ((name, metrics.count(ATTENTION_PASSES, kernel=name)) for name in _KERNELS)
    found = ", ".join(f"{name} {passes:,.0f}" for name, passes in ran if passes)
    return metrics.count(ATTENTION_PASSES, kernel=kernel), f"of {total:,.0f} passes ({ATTENTION_PASSES}: {found})"


def _can_run_msa(facts: Facts) -> tuple[bool | None, str]:
    topk = facts.topk_blocks
    kv_dtype, backend = facts.arg("kv_cache_dtype", "auto"), facts.arg("attention_backend")
    if facts.device == "cpu":
        return False, "needs an SM100 GPU (B200, B300), this is a CPU: torch runs instead"
    if facts.device == "rocm" or backend == "fa3":
        return False, f"needs an SM100 GPU (B200, B300), attention backend is {backend}: Triton runs instead"
    if facts.page_size != _MSA_BLOCK:
        return False, f"page size must be {_MSA_BLOCK}, is {facts.page_size}: Triton runs instead"
    if facts.arg("enable_hisparse", False):
        return False, "a pool that is not remapped, HiSparse is on: Triton runs instead"
    if topk is not None and topk not in _MSA_TOPK:
        return False, f"chosen blocks must be one of {_MSA_TOPK}, are {topk}: Triton runs instead"
    if kv_dtype == "fp8_e5m2" or (kv_dtype == "fp8_e4m3" and backend != "trtllm_mha"):
        return False, f"FP8 K/V only as e4m3 with trtllm_mha, is {kv_dtype} with {backend}: Triton runs instead"
    if facts.architecture is None:
        return None, "an SM100 GPU (B200, B300) with fmha_sm100 installed, which this server does not tell"
    found = f"this is {facts.architecture}, {'' if facts.msa_installed else 'not '}installed"
    able = facts.architecture in _MSA_ARCHITECTURES and bool(facts.msa_installed)
    return (
        able,
        f"an SM100 GPU (B200, B300) with fmha_sm100 installed: {found}{'' if able else ': Triton runs instead'}",
    )


def decode_graph(facts: Facts, metrics: Metrics) -> AuditRow:
    """Decode steps replayed as a CUDA graph."""
    return _graph(facts, metrics, "decode")


def prefill_graph(facts: Facts, metrics: Metrics) -> AuditRow:
    """Prefill passes replayed as a CUDA graph."""
    return _graph(facts, metrics, "prefill")


def _graph(facts: Facts, metrics: Metrics, phase: str) -> AuditRow:
    settings = (facts.arg("cuda_graph_config") or {}).get(phase) or {}
    backend = settings.get("backend")
    configured = None if backend is None else backend != "disabled"
    setting = f"cuda_graph_config.{phase}.backend is {backend}"
    if backend is None:  # a recorded run keeps plain arguments only
        switches = ("disable_cuda_graph", f"disable_{phase}_cuda_graph")
        off = [name for name in switches if facts.arg(name, False)]
        configured, setting = (False, off[0]) if off else (None, f"cuda_graph_config.{phase}.backend is not known")
    unit = "sequences" if phase == "decode" else "tokens"
    eligible = False if facts.device == "cpu" else True if settings.get("max_bs") else None
    limit = settings.get("max_bs", "the largest captured size, in")
    condition = "a GPU, this is a CPU" if facts.device == "cpu" else f"batches up to {limit} {unit}"
    with_graph = metrics.count(GRAPH_PASSES, mode=f"{phase}_cuda_graph")
    passes = with_graph + metrics.count(GRAPH_PASSES, mode=f"{phase}_none")
    return AuditRow(
        f"CUDA graph, {phase}",
        configured,
        setting,
        eligible,
        condition,
        with_graph,
        f"of {passes:,.0f} {phase} passes ({GRAPH_PASSES})",
    )


def aiter_sparse_attention(facts: Facts, metrics: Metrics) -> AuditRow:
    """AITER's paged attention for M3's sparse layers, which SGLang 0.5.23 has for prefill only.

    Its conditions: ``minimax_sparse_ops/minimax_sparse.py`` and ``can_use_gluon_prefill`` beside its kernels.
    """
    asked = facts.switch("SGLANG_USE_AITER", False)
    prefill = facts.switch("SGLANG_OPT_USE_MINIMAX_GLUON_PREFILL", True)
    configured = None if asked is None or prefill is None else asked and prefill
    setting = NOT_REPORTED if configured is None else f"SGLANG_USE_AITER={int(bool(asked))}"
    condition = f"prefill on gfx95, one KV head per rank (decode runs in Triton); {facts.heads_text}"
    kv_dtype = facts.arg("kv_cache_dtype", "auto")
    eligible: bool | None
    if facts.device in ("cpu", "cuda"):
        eligible, condition = False, f"gfx95, this is {facts.device}"
    elif facts.architecture is not None and not facts.architecture.startswith("gfx95"):
        eligible, condition = False, f"gfx95, this is {facts.architecture}"
    elif str(kv_dtype).startswith("fp8"):
        eligible, condition = False, f"K/V of the queries' type, is {kv_dtype}: Triton runs instead"
    elif facts.arg("enable_hisparse", False):
        eligible, condition = False, "a pool that is not remapped, HiSparse is on: Triton runs instead"
    elif facts.kv_heads is None:
        eligible = None
    elif facts.kv_heads != 1:
        eligible = False
    else:
        eligible = True if facts.device == "rocm" else None
    return AuditRow(
        "AITER sparse paged attention",
        configured,
        setting,
        eligible,
        condition,
        *_passes_of(metrics, "aiter", "SGLang logs once when it falls back to Triton, and not when it runs"),
    )


def quantized_all_reduce(facts: Facts, metrics: Metrics) -> AuditRow:
    """ROCm's QuickReduce with a codec. Configured says nothing of a message that is too small for it."""
    codec, allowed = facts.variable(_CODEC_VARIABLE), facts.switch(_CUSTOM_VARIABLE, False)
    if codec is None or allowed is None:
        configured, setting = None, NOT_REPORTED
    else:
        kept = allowed and not facts.arg("disable_custom_all_reduce", False)
        configured = codec in CODECS and codec != "FP" and kept
        setting = f"{_CODEC_VARIABLE}={codec or 'NONE'}, {_CUSTOM_VARIABLE}={int(allowed)}"
    return AuditRow(
        "quantized all-reduce",
        configured,
        setting,
        *_can_quantize(facts, codec),
        *_reduced_passes(metrics),
    )


def _reduced_passes(metrics: Metrics) -> tuple[float | None, str]:
    total = metrics.total(ATTENTION_PASSES)  # counted beside it
    if total is None:
        return None, "nothing counts it, since agentserve did not launch this server: take a profile"
    return metrics.count(QUICK_REDUCE_PASSES), f"of {total:,.0f} passes ({QUICK_REDUCE_PASSES})"


def _can_quantize(facts: Facts, codec: str | None) -> tuple[bool | None, str]:
    if facts.tp == 1:
        return False, "one rank reduces nothing"
    if facts.device in ("cpu", "cuda"):
        return False, f"ROCm only, this is {facts.device}"
    if codec is None:
        return None, "the message must reach the codec's smallest size; no codec known"
    if codec not in CODECS:
        return False, f"a codec of {', '.join(CODECS)}; {_CODEC_VARIABLE} is {codec or 'not set'}"
    floor = min_message_bytes(codec, facts.tp, cast_to_fp16=facts.switch(_CAST_VARIABLE, True) is not False)
    if floor is None:
        return False, f"QuickReduce knows 2, 4 and 8 ranks, tp is {facts.tp}"
    if facts.sizes is None:
        return None, f"messages of at least {floor / 2**20:g} MiB; hidden size unknown, pass --recipe"
    token = communication(facts.sizes, facts.tp, activation_bytes=2).message_bytes
    steps = {"decode": facts.arg("max_running_requests"), "prefill chunk": facts.arg("chunked_prefill_size")}
    sizes = {name: int(tokens) * token for name, tokens in steps.items() if tokens}
    found = ", ".join(f"{name} up to {size / 2**20:.1f} MiB" for name, size in sizes.items())
    eligible = any(size >= floor for size in sizes.values()) if sizes else None
    return eligible, f"messages of at least {floor / 2**20:g} MiB ({codec}, tp {facts.tp}); {found}"
