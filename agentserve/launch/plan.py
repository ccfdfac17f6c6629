"""From a recipe to the one command that starts SGLang: pure, so that what is shown is what is run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson

from agentserve.launch.facts import CheckpointFacts
from agentserve.launch.recipe import Recipe
from agentserve.runtime.index_reuse import REUSE_VARIABLE, ROCM_VARIABLE, parse_index_reuse
from agentserve.runtime.policy_settings import BACKEND, EVICTION_VARIABLE, PolicySettings
from agentserve.runtime.server_facts import ASKED_VARIABLE
from agentserve.runtime.speculation import VARIABLES, SpeculationSettings
from agentserve.watch.settings import WATCH_VARIABLE
from offload.settings import SETTINGS_VARIABLE
from offload.state import Plane, shareable_layers

CPU_PLATFORM = "agentserve_cpu"  # our entry point in the group sglang.srt.platforms


class PlanError(ValueError):
    """A recipe that leaves open what the checkpoint does not say."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A process to start.

    Attributes:
        argv: program and arguments.
        env: variables set on top of the caller's environment.
        unset: variables removed from the caller's environment.
        cwd: working directory.
        url: base URL that clients use.
        notes: choices made for the user, one sentence each.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...]
    cwd: Path
    url: str
    notes: tuple[str, ...] = ()

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The complete environment of the process, given the caller's."""
        kept = {name: value for name, value in base.items() if name not in self.unset}
        return {**kept, **self.env}

    def shell(self) -> str:
        """The same as one line for a shell, quoted."""
        words = ["env"]
        for name in self.unset:
            words += ["-u", name]
        words += [f"{name}={value}" for name, value in self.env.items()]
        return shlex.join([*words, *self.argv])


def make_plan(
    recipe: Recipe,
    facts: CheckpointFacts | None,
    *,
    model: str,
    cwd: Path,
    draft: CheckpointFacts | None = None,
) -> LaunchPlan:
    """The command for a recipe.

    Args:
        recipe: validated settings.
        facts: what the checkpoint says, or None where it cannot be read (then the recipe must say more).
        model: path or id that SGLang gets as its model.
        cwd: working directory of the server.
        draft: what the EAGLE3 draft's checkpoint says, or None where there is none or it cannot be read.

    Raises:
        PlanError: the page size, or the draft's capture layers, are neither in the recipe nor known from a checkpoint.
    """
    page_size = recipe.page_size or (facts.block_size if facts else None)
    if page_size is None:
        raise PlanError(
            "page_size is not set and the checkpoint does not tell its sparse block size; "
            "pass --page-size (MiniMax-M3: 128)"
        )
    notes = []
    if recipe.page_size is None:
        notes.append(f"page size {page_size}: the checkpoint's sparse block size")
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
    argv += _options(
        {
            "--served-model-name": recipe.served_name,
            # ROCm's torch goes by the name of cuda.
            "--device": "cpu" if recipe.device == "cpu" else "cuda",
            "--dtype": recipe.dtype,
            "--tp-size": recipe.tp,
            "--context-length": recipe.context_length,
            "--page-size": page_size,
            "--max-total-tokens": recipe.kv.capacity_tokens,
            "--mem-fraction-static": recipe.kv.memory_fraction,
            "--kv-cache-dtype": recipe.kv.dtype,
            "--chunked-prefill-size": recipe.prefill_chunk,
            "--max-running-requests": recipe.max_running_requests,
            "--attention-backend": recipe.attention_backend or ("torch_native" if recipe.device == "cpu" else None),
            "--radix-eviction-policy": recipe.radix.eviction_policy,
            "--radix-cache-backend": BACKEND if recipe.radix.policy else None,
            "--kv-events-config": _kv_events(recipe.kv_events),
            **_speculation_options(recipe, draft),
            "--host": recipe.host,
            "--port": recipe.port,
        }
    )
    switches = {
        "--disable-radix-cache": recipe.radix.disable,
        "--enable-cache-report": recipe.cache_report,
        "--enable-metrics": recipe.metrics,
        "--enable-lmcache": recipe.offload.backend is not None,
        # An idle scheduler spins; on a few shared cores it takes them from the clients it waits for.
        "--sleep-on-idle": recipe.device == "cpu",
    }
    argv += [flag for flag, on in switches.items() if on]
    argv += recipe.extra_args

    env = {ASKED_VARIABLE: "1"} | (_cpu_env(recipe, facts, notes) if recipe.device == "cpu" else {})
    if recipe.radix.policy:
        env |= PolicySettings(recipe.radix.policy, recipe.radix.admission, recipe.radix.truncate).environment()
    if recipe.index_reuse:
        reuse = parse_index_reuse(recipe.index_reuse)
        # ROCm's backend shares selections itself; ours would get in the way of its fused kernels.
        env |= {ROCM_VARIABLE: str(reuse.freq)} if recipe.device == "rocm" else reuse.environment()
    env |= _speculation_env(recipe, draft, notes)
    if recipe.offload.backend is not None:
        env |= recipe.offload.settings(recipe.tp).environment()
    if recipe.watch:
        env |= {WATCH_VARIABLE: "1"}
    env |= recipe.env
    # Set, it selects SGLang's own CPU engine, which needs the CPU build of sgl_kernel. On a GPU a platform
    # left over in the shell would put the model on the CPU.
    foreign = ["SGLANG_USE_CPU_ENGINE"] if recipe.device == "cpu" else ["SGLANG_USE_CPU_ENGINE", "SGLANG_PLATFORM"]
    # Left over from another launch, it would register what this recipe did not ask for.
    foreign += [EVICTION_VARIABLE, REUSE_VARIABLE, ROCM_VARIABLE, *VARIABLES, WATCH_VARIABLE]
    foreign += [SETTINGS_VARIABLE, "LMCACHE_CONFIG_FILE"]
    return LaunchPlan(
        argv=tuple(argv),
        env=env,
        unset=tuple(name for name in foreign if name not in env),
        cwd=cwd,
        url=base_url(recipe.host, recipe.port),
        notes=tuple(notes),
    )


def base_url(host: str, port: int) -> str:
    """Where a client on this machine reaches the server; a wildcard address is no destination."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def served_dtype(recipe: Recipe, facts: CheckpointFacts) -> str:
    """Element type the model runs in. SGLang serves a float32 checkpoint in float16 unless told otherwise."""
    if recipe.dtype != "auto":
        return recipe.dtype
    return "float16" if facts.dtype == "float32" else facts.dtype


def cache_dtypes(recipe: Recipe, facts: CheckpointFacts) -> tuple[str, str]:
    """Element types of K/V and of index K (srt/mem_cache/memory_pool.py: get_minimax_sparse_index_dtype)."""
    model = served_dtype(recipe, facts)
    kv = model if recipe.kv.dtype == "auto" else recipe.kv.dtype
    if recipe.device == "rocm" and recipe.env.get("SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE", "1") not in (
        "0",
        "false",
    ):
        return kv, "fp8_e4m3"
    if recipe.device == "cuda" and kv == "fp8_e4m3":
        return kv, kv
    return kv, model


def index_sources(recipe: Recipe, facts: CheckpointFacts) -> tuple[int, ...] | None:
    """Layers that keep index keys when others reuse their selection; None where all sparse layers keep them.

    Raises:
        IndexReuseError: the recipe's ``index_reuse`` does not fit the checkpoint.
        StateError: the checkpoint's config lacks a field.
    """
    if recipe.index_reuse is None:
        return None
    pattern = parse_index_reuse(recipe.index_reuse).pattern(shareable_layers(facts.config))
    # SGLang's own sharing on ROCm leaves every layer its index keys.
    return None if recipe.device == "rocm" else pattern.sources


def served_planes(recipe: Recipe, facts: CheckpointFacts, draft: CheckpointFacts | None = None) -> list[Plane]:
    """The planes of a cached prefix on one rank as the recipe serves them. Raises as ``index_sources`` does."""
    kv, index = cache_dtypes(recipe, facts)
    sources = index_sources(recipe, facts)
    return facts.planes(kv_dtype=kv, index_dtype=index, tp=recipe.tp, index_sources=sources, draft=draft)


def _cpu_env(recipe: Recipe, facts: CheckpointFacts | None, notes: list[str]) -> dict[str, str]:
    env = {
        "SGLANG_PLATFORM": CPU_PLATFORM,
        "OMP_NUM_THREADS": str(recipe.cpu.omp_threads),
        # Compiling costs 5-27 s at the first request and brings nothing on a CPU.
        "TORCH_COMPILE_DISABLE": "1",
        # glibc gives large tensors back to the kernel when they are freed, and every layer of every step pays the
        # page faults again; kept, gathering the index keys of 6 x 24,000 tokens took 10 ms instead of 25.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc's own maximum
        "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        "MALLOC_TOP_PAD_": str(256 << 20),
    }
    dtype = served_dtype(recipe, facts) if facts else recipe.dtype
    if dtype == "float32":
        # SGLang keeps the router's gate in bf16 whatever the model's dtype; float32 is asked for to compare
        # outputs exactly, and a rounded gate flips routings.
        env["SGLANG_OPT_USE_BF16_ROUTER_GEMM"] = "0"
    if recipe.cpu.threads_bind is not None:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = recipe.cpu.threads_bind
    elif recipe.tp > 1:
        # Without it SGLang refuses more ranks than NUMA nodes.
        env["SGLANG_CPU_OMP_THREADS_BIND"] = rank_cores(recipe.tp, recipe.cpu.omp_threads)
        notes.append(f"tp {recipe.tp} on a CPU: ranks bound to cores {env['SGLANG_CPU_OMP_THREADS_BIND']}")
    return env


def _speculation_options(recipe: Recipe, draft: CheckpointFacts | None) -> dict[str, str | int]:
    eagle3 = recipe.eagle3
    if eagle3.draft is None:
        return {}
    return {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(draft.path) if draft else eagle3.draft,
        "--speculative-num-steps": eagle3.steps,
        # A linear chain: the only shape that M3's sparse attention verifies.
        "--speculative-eagle-topk": 1,
        "--speculative-num-draft-tokens": eagle3.steps + 1,
        # SGLang would take the target's, whose plans are made for the target's heads.
        "--speculative-draft-attention-backend": eagle3.attention_backend
        or ("torch_native" if recipe.device == "cpu" else "triton"),
    }


def _speculation_env(recipe: Recipe, draft: CheckpointFacts | None, notes: list[str]) -> dict[str, str]:
    eagle3 = recipe.eagle3
    if eagle3.draft is None:
        return {}
    named = draft.capture_layers if draft else None
    layers = eagle3.capture_layers or named
    if not layers:
        raise PlanError(
            "the draft's config.json does not say after which layers of the target its hidden states are taken "
            "(eagle_config.eagle_aux_hidden_state_layer_ids); set eagle3.capture_layers to those it was trained with"
        )
    settings = SpeculationSettings(eagle3.radix_keys, tuple(layers), eagle3.length)
    where = "the draft's config" if eagle3.capture_layers is None else "the recipe"
    notes.append(f"EAGLE3, {eagle3.steps} drafts a step, hidden states after layers {layers} ({where})")
    if settings.length is not None:
        notes.append(
            f"synthetic acceptance of {settings.length:g} tokens a step: right for speed only, the text is not the "
            "model's"
        )
    return settings.environment()


def rank_cores(tp: int, threads: int) -> str:
    """Consecutive cores for each rank, in SGLang's notation: ``0|1``, ``0-3|4-7``."""
    spans = ((rank * threads, (rank + 1) * threads - 1) for rank in range(tp))
    return "|".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _kv_events(endpoint: str | None) -> str | None:
    if endpoint is None:
        return None
    # bind: left to itself SGLang connects to any host but a wildcard, and nobody hears it.
    return orjson.dumps({"publisher": "zmq", "endpoint": endpoint, "topic": "kv", "bind": True}).decode()


def _options(values: Mapping[str, str | int | float | None]) -> list[str]:
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]
