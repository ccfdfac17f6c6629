"""What can be known to go wrong before the server is started, in seconds instead of minutes.

Each check is one function that returns findings; all of them run, so that all problems show at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

from agentserve.launch import host
from agentserve.launch.draft import draft_faults
from agentserve.launch.facts import (
    M3_ARCHITECTURES,
    CheckpointError,
    CheckpointFacts,
    read_draft,
    read_facts,
    resolve_model,
)
from agentserve.launch.finding import Finding
from agentserve.launch.offload_checks import check_offload
from agentserve.launch.plan import CPU_PLATFORM, index_sources, served_dtype, served_planes
from agentserve.launch.recipe import Recipe
from agentserve.runtime.index_reuse import IndexReuseError
from offload.segments import clear_stale_segments
from offload.state import StateError, bytes_per_token, dtype_bytes

SGLANG_VERSION = "0.5.23"  # the version the runtime plugin hooks into
SGLANG_OPEN_FILES = 65535  # srt/utils/common.py: set_ulimit
MIN_OPEN_FILES = 1024
MIN_SHM = 1 << 30  # NCCL and the ranks' message queues; a container gets 64 MiB unless told otherwise
# Resident memory of one SGLang process beside weights and KV cache (interpreter, torch, every model class):
# 0.6 GB for HTTP server and detokenizer, 0.7 GB for a scheduler, seen with 0.5.23 on a CPU.
PROCESS_BYTES = 700_000_000


@dataclass(frozen=True, slots=True)
class Preflight:
    """Outcome of all checks; ``facts`` and ``draft`` are None where the checkpoint cannot be read, ``draft`` also where
    none was asked for."""

    facts: CheckpointFacts | None
    findings: tuple[Finding, ...]
    draft: CheckpointFacts | None = None

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def preflight(recipe: Recipe, *, env: Mapping[str, str] | None = None) -> Preflight:
    """Run every check for a recipe on this machine. Raises the soft limit on open files on the way."""
    environ = os.environ if env is None else env
    findings: list[Finding] = []
    facts = None
    try:
        facts = read_facts(resolve_model(recipe.model))
    except CheckpointError as error:
        findings.append(Finding("error", str(error), error.fix))
    if facts is not None:
        findings += check_weights(facts)
        findings += check_architecture(facts)
        findings += check_page_size(recipe, facts)
        findings += check_context(recipe, facts)
        findings += check_index_reuse(recipe, facts)
    draft = None
    if recipe.eagle3.draft is not None:
        try:
            draft = read_draft(recipe.eagle3.draft)
        except CheckpointError as error:
            findings.append(Finding("error", str(error), error.fix))
        if facts is not None and draft is not None:
            findings += check_draft(recipe, facts, draft)
    findings += check_pages(recipe, facts)
    findings += check_port(recipe)
    findings += check_software(recipe)
    if recipe.device == "cpu":
        findings += check_cores(recipe, host.usable_cores())
        if facts is not None and facts.is_m3:
            findings += check_ram(recipe, facts, host.available_ram(), draft)
    else:
        gpus = (host.nvidia_gpus if recipe.device == "cuda" else host.rocm_gpus)(environ)
        findings += check_gpus(recipe, gpus)
        if facts is not None and facts.is_m3 and gpus and len(gpus) >= recipe.tp:
            findings += check_gpu_memory(recipe, facts, gpus[: recipe.tp], draft)
    findings += check_open_files(*host.raise_open_file_limit(SGLANG_OPEN_FILES))
    if recipe.offload.backend is not None:
        clear_stale_segments()
        findings += check_offload(recipe, facts, host.available_ram())
        if recipe.device == "cpu" and facts is not None and facts.is_m3:
            findings += check_shared_kv(recipe, facts, host.shm_free(), draft)
    findings += check_shm(recipe, host.shm_free())
    return Preflight(facts, tuple(findings), draft)


def check_weights(facts: CheckpointFacts) -> Iterator[Finding]:
    """The files that the index names are there."""
    if not facts.weight_files:
        yield Finding("error", f"{facts.path} holds no safetensors files", "download or write the checkpoint again")
    if facts.missing_files:
        shown = ", ".join(facts.missing_files[:3]) + (", ..." if len(facts.missing_files) > 3 else "")
        yield Finding(
            "error",
            f"{facts.path}: {len(facts.missing_files)} of {len(facts.weight_files)} weight files of the "
            f"index are missing ({shown})",
            "finish the download",
        )


def check_architecture(facts: CheckpointFacts) -> Iterator[Finding]:
    """It is an M3: the plugin's hooks are for no other model."""
    if not facts.is_m3:
        yield Finding(
            "error",
            f"{facts.path / 'config.json'}: field 'architectures' is {facts.architecture or 'empty'}, "
            f"not {' or '.join(M3_ARCHITECTURES)}",
            "agentserve launches MiniMax-M3 only; start other models with `python -m sglang.launch_server`",
        )


def check_draft(recipe: Recipe, facts: CheckpointFacts, draft: CheckpointFacts) -> Iterator[Finding]:
    """The draft is whole and was made for a target of these sizes."""
    yield from check_weights(draft)
    for what, fix in draft_faults(facts.text_config, draft.config, draft.architecture, recipe.eagle3.capture_layers):
        yield Finding("error", f"{draft.path / 'config.json'}: {what}", fix)


def check_page_size(recipe: Recipe, facts: CheckpointFacts) -> Iterator[Finding]:
    """A page is a sparse block: block selection addresses the cache by pages."""
    if recipe.page_size is None or facts.block_size is None or recipe.page_size == facts.block_size:
        return
    yield Finding(
        "error",
        f"page_size {recipe.page_size} is not the checkpoint's sparse block size {facts.block_size}",
        f"leave page_size out, or set it to {facts.block_size}",
    )


def check_pages(recipe: Recipe, facts: CheckpointFacts | None) -> Iterator[Finding]:
    """Chunks and capacity are whole pages, which SGLang would round or refuse."""
    page = recipe.page_size or (facts.block_size if facts else None)
    if page is None:
        return
    if recipe.prefill_chunk is not None and recipe.prefill_chunk % page:
        yield Finding(
            "error",
            f"prefill_chunk {recipe.prefill_chunk} is not a multiple of the page size {page}",
            f"set it to {max(page, recipe.prefill_chunk // page * page)}",
        )
    capacity = recipe.kv.capacity_tokens
    if capacity is not None and capacity < page:
        yield Finding("error", f"kv.capacity_tokens {capacity} is less than one page of {page}", "set it higher")
    elif capacity is not None and capacity % page:
        yield Finding(
            "warning",
            f"kv.capacity_tokens {capacity} is rounded down to whole pages of {page}",
            f"set it to {capacity // page * page}",
        )


def check_context(recipe: Recipe, facts: CheckpointFacts) -> Iterator[Finding]:
    """The longest request fits the checkpoint's positions and the cache."""
    limit = facts.max_positions
    if recipe.context_length is not None and limit is not None and recipe.context_length > limit:
        yield Finding(
            "error",
            f"context_length {recipe.context_length} exceeds the checkpoint's {limit} positions",
            f"set it to {limit} or less",
        )
    context = recipe.context_length or limit
    capacity = recipe.kv.capacity_tokens
    if context is not None and capacity is not None and capacity < context:
        yield Finding(
            "warning",
            f"kv.capacity_tokens {capacity} is less than one context of {context}: longer requests fail",
            f"set context_length to {capacity} or less, or raise kv.capacity_tokens",
        )


_PIPELINE = ("--pp-size", "--pipeline-parallel-size")
_NOT_WITH_INDEX_REUSE = {
    "--enable-two-batch-overlap": "its halves interleave the layers that share a selection",
    "--enable-hisparse": "it swaps index keys by layer",
    **dict.fromkeys(_PIPELINE, "the layer that chooses may be on another rank"),
}


def check_index_reuse(recipe: Recipe, facts: CheckpointFacts) -> Iterator[Finding]:
    """The pattern of shared selections fits the checkpoint's sparse layers."""
    try:
        index_sources(recipe, facts)
    except (IndexReuseError, StateError) as error:
        yield Finding("error", str(error), "correct index_reuse, or leave it out")
    if recipe.index_reuse is None:
        return
    for place, word in enumerate(recipe.extra_args):
        flag, _, value = word.partition("=")
        value = value or next(iter(recipe.extra_args[place + 1 :]), "")
        why = _NOT_WITH_INDEX_REUSE.get(flag)
        if why is not None and not (flag in _PIPELINE and (value == "1" or recipe.device == "rocm")):
            # The server would say so too, once the weights are loaded.
            yield Finding("error", f"index reuse does not run with {flag}: {why}", "leave one of them out")


def check_port(recipe: Recipe) -> Iterator[Finding]:
    """Nobody else listens there."""
    problem = host.port_problem(recipe.host, recipe.port)
    if problem is not None:
        yield Finding("error", problem, "stop that process, or pass --port with a free one")


def check_software(recipe: Recipe) -> Iterator[Finding]:
    """SGLang's version, our plugin in this Python, and a torch for the device."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        yield Finding("error", "sglang is not installed", "see the README's section on installation")
        return
    if found != SGLANG_VERSION:
        yield Finding(
            "warning",
            f"sglang {found} is installed, the runtime plugin is written for {SGLANG_VERSION}",
            f"install sglang=={SGLANG_VERSION}",
        )
    platforms = {entry.name for entry in entry_points(group="sglang.srt.platforms")}
    if recipe.device == "cpu" and CPU_PLATFORM not in platforms:
        yield Finding(
            "error",
            f"the platform plugin {CPU_PLATFORM} is not registered with this Python",
            "install agentserve into it, with `pip install -e .` in a checkout",
        )
    if recipe.device != "cpu":
        try:
            torch = version("torch")
        except PackageNotFoundError:
            yield Finding("error", "torch is not installed", "see the README's section on installation")
            return
        if torch.endswith("+cpu"):
            yield Finding(
                "error",
                f"torch {torch} is a CPU build, the recipe's device is {recipe.device}",
                "install the GPU extras in a fresh environment",
            )


def check_cores(recipe: Recipe, cores: int) -> Iterator[Finding]:
    """All ranks' threads have cores of their own."""
    wanted = recipe.tp * recipe.cpu.omp_threads
    if wanted > cores:
        yield Finding(
            "warning",
            f"tp {recipe.tp} with {recipe.cpu.omp_threads} threads each wants {wanted} cores, {cores} usable",
            "lower tp or cpu.omp_threads",
        )


def check_ram(
    recipe: Recipe, facts: CheckpointFacts, available: int, draft: CheckpointFacts | None = None
) -> Iterator[Finding]:
    """Weights, KV cache and the processes themselves against available memory, in bytes."""
    try:
        weights = sum(served_weight_bytes(recipe, each) for each in (facts, draft) if each)
        kv = recipe.tp * rank_bytes_per_token(recipe, facts, draft) * (recipe.kv.capacity_tokens or 0)
    except StateError as error:
        yield Finding("error", f"{facts.path / 'config.json'}: {error}", "check the checkpoint and tp")
        return
    except IndexReuseError:
        return  # check_index_reuse says it
    processes = PROCESS_BYTES * (2 + recipe.tp)  # HTTP server, detokenizer, one scheduler a rank
    if weights + kv + processes > available:
        yield Finding(
            "error",
            f"not enough memory: {_gb(weights)} of weights, {_gb(kv)} of KV cache and about "
            f"{_gb(processes)} of processes, but {_gb(available)} are available",
            "lower kv.capacity_tokens (--kv-tokens)",
        )


def check_gpus(recipe: Recipe, gpus: list[host.Gpu] | None) -> Iterator[Finding]:
    """A driver answers and shows a GPU for each rank."""
    if gpus is None:
        tool = "nvidia-smi" if recipe.device == "cuda" else "rocm-smi"
        yield Finding("error", f"{tool} does not answer: no usable GPU driver", "use a recipe for a CPU: tiny-cpu")
    elif len(gpus) < recipe.tp:
        yield Finding("error", f"tp {recipe.tp} needs as many GPUs, {len(gpus)} are visible", "lower tp (--tp)")


def check_gpu_memory(
    recipe: Recipe, facts: CheckpointFacts, gpus: list[host.Gpu], draft: CheckpointFacts | None = None
) -> Iterator[Finding]:
    """Weights and KV cache of one rank against the GPU with the least free memory, in bytes."""
    try:
        weights = sum(served_weight_bytes(recipe, each) for each in (facts, draft) if each) // recipe.tp
        per_token = rank_bytes_per_token(recipe, facts, draft)
    except StateError as error:
        yield Finding("error", f"{facts.path / 'config.json'}: {error}", "check the checkpoint and tp")
        return
    except IndexReuseError:
        return  # check_index_reuse says it
    gpu = min(gpus, key=lambda gpu: gpu.free)
    # A fraction keeps its complement free for activations and graphs.
    spare = int(gpu.total * (1 - recipe.kv.memory_fraction)) if recipe.kv.memory_fraction else 0
    capacity = max(0, (gpu.free - spare - weights) // per_token)
    wanted = recipe.kv.capacity_tokens or recipe.context_length or facts.block_size or 1
    if capacity < wanted:
        yield Finding(
            "error",
            f"not enough GPU memory: {_gb(gpu.free)} are free, memory_fraction sets {_gb(spare)} aside and "
            f"weights take {_gb(weights)} a rank: room for {capacity} tokens of KV cache, {wanted} needed",
            "free the GPU, raise tp, or lower kv.capacity_tokens or context_length",
        )


def check_open_files(soft: int, hard: int) -> Iterator[Finding]:
    """Limits on open files, soft and hard, are enough for the clients: two of them a connection."""
    if soft < MIN_OPEN_FILES:
        yield Finding("error", f"only {soft} files may be open (hard limit {hard})", "raise it with `ulimit -Hn`")
    elif soft < SGLANG_OPEN_FILES:
        yield Finding(
            "warning",
            f"{soft} files may be open (hard limit {hard}), SGLang asks for {SGLANG_OPEN_FILES}: "
            f"about {soft // 2} connections at once",
            "raise the hard limit for many clients (`ulimit -Hn`, or --ulimit nofile of the container)",
        )


def check_shm(recipe: Recipe, free: int | None) -> Iterator[Finding]:
    """Ranks exchange tensors through shared memory; bytes free there, None: there is none."""
    if recipe.tp > 1 and (free is None or free < MIN_SHM):
        size = "missing" if free is None else f"{_gb(free)} free"
        yield Finding("warning", f"/dev/shm is {size}: tp > 1 exchanges data there", "give the container --shm-size 8g")


def check_shared_kv(
    recipe: Recipe, facts: CheckpointFacts, shm: int | None, draft: CheckpointFacts | None = None
) -> Iterator[Finding]:
    """With offload on a CPU the KV caches of all ranks lie in shared memory; bytes free there, None: there is none."""
    try:
        kv = recipe.tp * rank_bytes_per_token(recipe, facts, draft) * (recipe.kv.capacity_tokens or 0)
    except (StateError, IndexReuseError):
        return  # reported by the check of memory
    if shm is None or kv > shm:
        yield Finding(
            "error",
            f"the KV cache of {_gb(kv)} lies in /dev/shm with offload on a CPU, "
            f"{'which is missing' if shm is None else f'{_gb(shm)} are free there'}",
            "enlarge /dev/shm (--shm-size of the container), or lower kv.capacity_tokens (--kv-tokens)",
        )


def rank_bytes_per_token(recipe: Recipe, facts: CheckpointFacts, draft: CheckpointFacts | None = None) -> int:
    """Bytes one token of cached prefix takes on one rank. Raises ``offload.state.StateError``."""
    return bytes_per_token(served_planes(recipe, facts, draft))


def served_weight_bytes(recipe: Recipe, facts: CheckpointFacts) -> int:
    """Bytes of weights once loaded: the files', scaled where an unquantized model runs in another type."""
    if facts.quantized:
        return facts.weight_bytes
    return facts.weight_bytes * dtype_bytes(served_dtype(recipe, facts)) // dtype_bytes(facts.dtype)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
