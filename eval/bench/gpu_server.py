"""A server of the benchmarks on a GPU: real SGLang, layers of MiniMax-M3's real shapes, random weights.

Only the standard library is needed beside what SGLang itself needs: the machine with the GPU has little else.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentserve.checkpoint.config import TinyM3Shape
from eval.bench.gpu_frame import plugin_path, python_path
from eval.bench.index_reuse_weights import FUSE_VARIABLE, GATE_VARIABLE

# MiniMax-M3's published sizes; six of its 60 layers, which is what one GPU holds in bf16 beside the KV cache.
REAL = TinyM3Shape(
    hidden_size=6144, num_layers=6, num_dense_layers=1, num_heads=64, num_kv_heads=4, head_dim=128, rotary_dim=64,
    num_experts=128, experts_per_token=4, expert_size=3072, dense_size=12288, num_index_heads=4, index_dim=128,
    topk_blocks=16, vocab_size=200_064, max_position=524_288, dtype="bfloat16",
)  # fmt: skip
# The same attention in 24 sparse layers instead of five, with 16 experts a layer instead of 128 so that it fits: what a
# layer saves is resolved 4.5 times better, and at batch 1 a step reads four experts of a layer either way.
DEEP = replace(REAL, num_layers=25, num_experts=16)
FEW_EXPERTS = replace(REAL, num_experts=16)  # loads in a fraction of the time, for what is no question of speed
TINY = TinyM3Shape(dtype="float32")

IDLE_MEGABYTES = 8_000  # of GPU memory; a stopped server's is free again below that
# What Triton (3.6) prints with TRITON_PRINT_AUTOTUNING=1 once a kernel has its configuration for a key.
_CHOICE = re.compile(
    r"Triton autotuning for function (\w+),\s+with key as (\([^\n]*\)),\s+finished after \S+,\s+"
    r"best config selected: ([^;]*);"
)
_CPU_OPTIONS = ("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sleep-on-idle")
_GPU_OPTIONS = (
    "--dtype", "bfloat16", "--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled",
    "--context-length", "131072",
)  # fmt: skip


class GpuServer:
    """A starting or running server. Its weights come from ``index_reuse_weights``, which also waits at the gate.

    Args:
        folder: for its gate and log; made here.
        model: a folder with a ``config.json``.
        options: of SGLang, beside those that all of these servers have.
        environment: variables, likewise.
        cpu: on this project's CPU platform, to try the benchmark itself.
        ranks: GPUs to share the model.
        name: in error messages.
    """

    def __init__(
        self, folder: Path, model: Path, options: Sequence[str], environment: Mapping[str, str], *,
        cpu: bool, ranks: int, name: str,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.gate, self._log = name, folder / "gate", folder / "server.log"
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        argv = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy",
            "--page-size", "128", "--chunked-prefill-size", "8192", "--port", self.url.rpartition(":")[2],
            "--skip-tokenizer-init", "--skip-server-warmup", "--enable-metrics",
            *(_CPU_OPTIONS if cpu else _GPU_OPTIONS), *options,
        ]  # fmt: skip
        if ranks > 1:  # SGLang's own all-reduce would map memory by multicast, which not every shared machine allows
            argv += ["--tp-size", str(ranks), "--disable-custom-all-reduce"]
        said = {"TRITON_PRINT_AUTOTUNING": "1", "PYTHONUNBUFFERED": "1"}  # read by configurations()
        env = {**os.environ, FUSE_VARIABLE: "1", **said, **environment, GATE_VARIABLE: str(self.gate)}
        if cpu:
            env |= {"SGLANG_PLATFORM": "agentserve_cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
            if ranks > 1:
                env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
            # On a GPU machine gpu_run.sh has put it on the path.
            own = plugin_path(folder / "weights", "bench_weights", "eval.bench.index_reuse_weights:register")
            env["PYTHONPATH"] = python_path(own, env.get("PYTHONPATH"))
        self._process = subprocess.Popen(
            argv, env=env, stdout=self._log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def open_gate(self) -> None:
        """The GPU is free: go on from importing to loading."""
        self.gate.touch()

    def wait_ready(self, timeout_s: float) -> None:
        """Raise RuntimeError with the log's end when it does not answer in time."""
        if answers(f"{self.url}/health", self._process, timeout_s):
            return
        raise RuntimeError(f"the {self.name} server did not get ready; its last lines:\n{self.tail()}")

    def log(self) -> str:
        """All it has written so far."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """The last lines of its log."""
        return self.log()[-3000:]

    def configurations(self) -> dict[str, list[str]]:
        """What SGLang's Triton kernels chose so far, ``{kernel and key: one configuration a rank}``."""
        return chosen_configurations(self.log())

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> tuple[float, list[dict[str, Any]]]:
        """Greedy generation of one batch; seconds and SGLang's answers."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        begin = time.perf_counter()
        payload = self.post("/generate", {"input_ids": prompts, "sampling_params": sampling, **options}, timeout_s=300)
        seconds = time.perf_counter() - begin
        answers: list[dict[str, Any]] = json.loads(payload)
        return seconds, answers

    def flush(self) -> None:
        """Empty the prefix cache, once the last request is put away: its answer comes a moment before that."""
        self.post("/flush_cache?timeout=30", None, timeout_s=60)

    def metrics(self) -> str:
        """Its counters in the Prometheus text format."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Mapping[str, Any] | None, *, timeout_s: float) -> bytes:
        """What it answers. Raises RuntimeError with its words where it refuses, OSError where it does not answer."""
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read().decode(errors='replace')[:500]}") from None

    def stop(self) -> None:
        """End it with all its processes and wait until the GPUs' memory is free again."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it has nothing to save, and the next one waits
            self._process.wait(8)
        for _ in range(60):
            if _gpu_megabytes() < IDLE_MEGABYTES:
                return
            time.sleep(0.5)


def chosen_configurations(log: str) -> dict[str, list[str]]:
    """Read from a server's log what Triton wrote there, ``{kernel and key: configurations, sorted}``."""
    found: dict[str, list[str]] = {}
    for kernel, key, configuration in _CHOICE.findall(log):
        found.setdefault(f"{kernel} {key}", []).append(configuration)
    return {kernel: sorted(found[kernel]) for kernel in sorted(found)}


def answers(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Whether a process answers at an address, with success, in time; not when it has ended."""
    give_up = time.monotonic() + timeout_s
    while time.monotonic() < give_up and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except OSError:
            time.sleep(0.3)
    return False


def free_ports(count: int) -> list[int]:
    """Local TCP ports that nobody listens on; all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _gpu_megabytes() -> int:
    """Memory in use on the fullest of the GPUs; 0 where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += ["-i", devices] if (devices := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    try:
        return max(
            int(line) for line in subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        )
    except (OSError, subprocess.CalledProcessError):
        return 0
