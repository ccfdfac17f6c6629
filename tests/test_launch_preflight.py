"""Preflight checks on real files, sockets and limits; machine sizes are passed in."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from agentserve.launch import preflight as checks
from agentserve.launch.facts import CheckpointError, CheckpointFacts, read_facts, resolve_model
from agentserve.launch.host import (
    Gpu,
    available_ram,
    free_port,
    parse_nvidia_smi,
    parse_rocm_smi,
    port_problem,
    raise_open_file_limit,
)
from agentserve.launch.preflight import Finding, preflight
from agentserve.launch.recipe import Recipe

SPARSE = [0, 1, 1]
CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "torch_dtype": "float32",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 128,
    "max_position_embeddings": 4096,
    "sparse_attention_config": {
        "sparse_attention_freq": SPARSE,
        "sparse_disable_index_value": SPARSE,
        "sparse_index_dim": 32,
        "sparse_block_size": 128,
    },
}
BYTES_PER_TOKEN = 3 * 2 * 2 * 32 * 4 + 2 * 32 * 4  # K and V of 3 layers, index K of 2, in float32


def write_checkpoint(folder: Path, config: dict[str, Any] = CONFIG, shards: int = 2) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-{n}.safetensors" for n in range(shards)]
    for name in names:
        (folder / name).write_bytes(bytes(1000))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: name for name in names}}))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m3")


def recipe(model: Path | str, **fields: Any) -> Recipe:
    base = {"device": "cpu", "dtype": "float32", "kv": {"capacity_tokens": 4096}, "port": free_port()}
    return Recipe.model_validate({"model": str(model)} | base | fields)


def errors(findings: Iterable[Finding]) -> list[str]:
    return [f"{finding.what}; {finding.fix}" for finding in findings if finding.level == "error"]


def warnings(findings: Iterable[Finding]) -> list[str]:
    return [finding.what for finding in findings if finding.level == "warning"]


def test_a_good_checkpoint_passes(checkpoint: Path) -> None:
    checked = preflight(recipe(checkpoint))
    # No claim about this machine's software: those findings are tested apart.
    about_files = [text for text in errors(checked.findings) if str(checkpoint) in text]
    assert about_files == []
    assert checked.facts is not None
    assert checked.facts.weight_bytes == 2000
    assert checked.facts.block_size == 128


def test_all_errors_come_together(checkpoint: Path) -> None:
    (checkpoint / "model-1.safetensors").unlink()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        checked = preflight(recipe(checkpoint, page_size=64, port=port, context_length=9999, prefill_chunk=100))
    text = "\n".join(errors(checked.findings))
    for part in (
        "1 of 2 weight files of the index are missing (model-1.safetensors)",
        "page_size 64 is not the checkpoint's sparse block size 128",
        f"pid {os.getpid()}",
        "context_length 9999 exceeds the checkpoint's 4096 positions",
        "prefill_chunk 100 is not a multiple of the page size 64",
    ):
        assert part in text
    assert not checked.ok


@pytest.mark.parametrize(
    ("prepare", "part"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "config.json does not exist"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: (write_checkpoint(path) / "config.json").write_text("{"), "config.json"),
        (lambda path: (write_checkpoint(path) / "model.safetensors.index.json").write_text("{}"), "'weight_map'"),
    ],
    ids=["nothing", "empty", "file", "bad json", "bad index"],
)
def test_unreadable_checkpoint_is_an_error_with_advice(tmp_path: Path, prepare: Any, part: str) -> None:
    path = tmp_path / "ckpt"
    prepare(path)
    found = [finding for finding in preflight(recipe(path)).findings if part in finding.what]
    assert len(found) == 1
    assert found[0].level == "error"
    assert found[0].fix


def test_hub_id_that_is_not_cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        resolve_model("MiniMaxAI/no-such-model")
    assert "hf download MiniMaxAI/no-such-model" in caught.value.fix


def test_wrong_architecture(tmp_path: Path) -> None:
    facts = read_facts(write_checkpoint(tmp_path / "x", CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    assert "LlamaForCausalLM" in errors(checks.check_architecture(facts))[0]


def test_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert "no safetensors" in errors(checks.check_weights(read_facts(tmp_path)))[0]


def test_capacity_rounding_and_capacity_below_context(checkpoint: Path) -> None:
    facts = read_facts(checkpoint)
    odd = recipe(checkpoint, kv={"capacity_tokens": 1000})
    assert "rounded down" in warnings(checks.check_pages(odd, facts))[0]
    assert "less than one context of 4096" in warnings(checks.check_context(odd, facts))[0]
    tiny = recipe(checkpoint, kv={"capacity_tokens": 100})
    assert "less than one page of 128" in errors(checks.check_pages(tiny, facts))[0]


def test_free_port_has_no_problem_and_lingering_connections_do_not_count() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as an HTTP server does
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        assert port_problem("127.0.0.1", port) is not None
        accepted.close()  # the server's side closes first: TIME_WAIT is on its port
        client.close()
    assert port_problem("127.0.0.1", port) is None


def test_unknown_host() -> None:
    problem = port_problem("no.such.host.invalid", 1)
    assert problem is not None
    assert "cannot be resolved" in problem


def test_ram_at_the_edge(checkpoint: Path) -> None:
    facts = read_facts(checkpoint)
    made = recipe(checkpoint)
    assert checks.rank_bytes_per_token(made, facts) == BYTES_PER_TOKEN
    need = 2000 + 4096 * BYTES_PER_TOKEN + 3 * checks.PROCESS_BYTES
    assert not errors(checks.check_ram(made, facts, need))
    assert "lower kv.capacity_tokens" in errors(checks.check_ram(made, facts, need - 1))[0]


def test_two_ranks_split_heads_and_replicate_the_index(checkpoint: Path) -> None:
    facts = read_facts(checkpoint)
    assert checks.rank_bytes_per_token(recipe(checkpoint, tp=2), facts) == 3 * 2 * 1 * 32 * 4 + 2 * 32 * 4


def test_gpu_memory_counts_weights_fraction_and_need(checkpoint: Path) -> None:
    facts = read_facts(checkpoint)
    gpu = Gpu(total=100_000_000, free=100_000_000)
    half = recipe(checkpoint, device="cuda", kv={"memory_fraction": 0.5}, context_length=4096)
    assert not errors(checks.check_gpu_memory(half, facts, [gpu]))
    busy = Gpu(total=100_000_000, free=50_002_000 + 4095 * BYTES_PER_TOKEN)
    assert (
        "room for 4095 tokens of KV cache, 4096 needed" in errors(checks.check_gpu_memory(half, facts, [gpu, busy]))[0]
    )


def test_weights_are_scaled_to_the_served_type_unless_quantized(checkpoint: Path) -> None:
    facts = read_facts(checkpoint)
    bf16 = recipe(checkpoint, dtype="bfloat16")
    assert checks.served_weight_bytes(bf16, facts) == 1000
    quantized = CheckpointFacts(facts.path, CONFIG | {"quantization_config": {}, "torch_dtype": "x"}, (), (), 2000)
    assert not quantized.quantized  # an empty section quantizes nothing
    real = CheckpointFacts(facts.path, CONFIG | {"quantization_config": {"quant_method": "mxfp8"}}, (), (), 2000)
    assert checks.served_weight_bytes(bf16, real) == 2000


def test_gpus_missing_or_too_few(checkpoint: Path) -> None:
    two = recipe(checkpoint, device="cuda", tp=2)
    assert "nvidia-smi does not answer" in errors(checks.check_gpus(two, None))[0]
    assert "1 are visible" in errors(checks.check_gpus(two, [Gpu(1, 1)]))[0]
    assert not errors(checks.check_gpus(two, [Gpu(1, 1)] * 2))


def test_vendor_tools_output() -> None:
    assert parse_nvidia_smi("143771, 143000\n[N/A], [N/A]\n") == [Gpu(143771 << 20, 143000 << 20)]
    card = {"VRAM Total Memory (B)": "100", "VRAM Total Used Memory (B)": "40"}
    assert parse_rocm_smi(json.dumps({"card0": card, "system": {}})) == [Gpu(100, 60)]
    assert parse_rocm_smi("WARNING: no amdgpu") == []


def test_open_file_limit_is_raised_up_to_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        reached, _ = raise_open_file_limit(512)
        assert reached == 512
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
        assert raise_open_file_limit(300)[0] == 512  # never lowered
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_file_findings() -> None:
    assert errors(checks.check_open_files(500, 500))
    assert warnings(checks.check_open_files(20000, 20000))
    assert not list(checks.check_open_files(65535, 65535))


def test_shared_memory_matters_between_ranks(checkpoint: Path) -> None:
    assert not list(checks.check_shm(recipe(checkpoint), 64 << 20))
    assert warnings(checks.check_shm(recipe(checkpoint, tp=2), 64 << 20))
    assert not list(checks.check_shm(recipe(checkpoint, tp=2), 8 << 30))


def test_cores(checkpoint: Path) -> None:
    assert warnings(checks.check_cores(recipe(checkpoint, tp=2, cpu={"omp_threads": 2}), 3))
    assert not list(checks.check_cores(recipe(checkpoint, tp=2), 2))


def test_sglang_version_and_plugin(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    versions = {"sglang": "9.9", "torch": "2.13.0+cpu"}
    monkeypatch.setattr(checks, "version", versions.__getitem__)
    monkeypatch.setattr(checks, "entry_points", lambda group: [])
    found = list(checks.check_software(recipe(checkpoint)))
    assert "9.9" in warnings(found)[0]
    assert "agentserve_cpu" in errors(found)[0]
    assert "CPU build" in errors(checks.check_software(recipe(checkpoint, device="cuda")))[0]


def test_container_limit_bounds_available_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert available_ram(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_ram(tmp_path) > 600_000
