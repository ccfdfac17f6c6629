"""One server of the index-reuse benchmark: real SGLang, layers of MiniMax-M3's real shapes, random weights.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.runtime.index_reuse import IndexReuse
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
_COUNTER = re.compile(r'^agentserve_index_(\w+)_total\{layer="(\d+)",mode="(\w+)"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mode:
    """What a server runs.

    Attributes:
        name: ``off``, ``shared`` (the selection only) or ``skipped`` (and no producers).
        fused: q, k, v and index projections are one product, as after loading a checkpoint. Unfused, the products
            of ``shared`` and ``skipped`` are the same ones, so that their tokens must be equal bit for bit.
        separate_store: reusing layers norm and store in SGLang's two kernels instead of ours.
    """

    name: str
    fused: bool = True
    separate_store: bool = False

    def __str__(self) -> str:
        return self.name + ("" if self.fused else ", unfused") + (", separate store" if self.separate_store else "")

    def environment(self, freq: int) -> dict[str, str]:
        reuse = IndexReuse(freq=freq, keep_producers=self.name == "shared", separate_store=self.separate_store)
        return {FUSE_VARIABLE: "1" if self.fused else "0", **({} if self.name == "off" else reuse.environment())}


class BenchServer:
    """A starting or running server.

    Args:
        folder: for its config, gate and log.
        mode: what it runs.
        freq: group size of the sharing modes.
        cpu: the tiny shape on this project's CPU platform, to try the benchmark itself.
        shape: of the model; ``REAL``, with ``cpu`` ``TINY``, unless given.
        ranks: GPUs to share it.
    """

    def __init__(
        self, folder: Path, mode: Mode, *, freq: int, cpu: bool, shape: TinyM3Shape | None = None, ranks: int = 1
    ) -> None:
        self.mode, self._cpu = mode, cpu
        folder.mkdir(parents=True)
        shape = shape or (TINY if cpu else REAL)
        (folder / "config.json").write_text(json.dumps(shape.hf_config(bos_id=0, eos_id=1)))
        self.gate, self._log = folder / "gate", folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sleep-on-idle",
                   "--max-total-tokens", "32768"] if cpu else [
                   "--dtype", "bfloat16", "--attention-backend", "triton", "--cuda-graph-backend-prefill", "disabled",
                   "--cuda-graph-bs-decode", "1", "8", "--context-length", "131072", "--mem-fraction-static", "0.86",
                   "--max-total-tokens", "983040"]  # fmt: skip
        if ranks > 1:  # our own all-reduce kernels would map memory by multicast, which not every machine allows
            options += ["--tp-size", str(ranks), "--disable-custom-all-reduce"]
        argv = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), "--load-format", "dummy",
            "--page-size", "128", "--chunked-prefill-size", "8192", "--max-running-requests", "8", "--port", str(port),
            "--skip-tokenizer-init", "--skip-server-warmup", "--enable-metrics",
            "--stream-interval", "4", *options,
        ]  # fmt: skip
        cpu_env = {"SGLANG_PLATFORM": "agentserve_cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        env = {**os.environ, **(cpu_env if cpu else {}), **mode.environment(freq), GATE_VARIABLE: str(self.gate)}
        self._process = subprocess.Popen(
            argv, env=env, stdout=self._log.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
        )

    def open_gate(self) -> None:
        """The GPU is free: go on from importing to loading."""
        self.gate.touch()

    def wait_ready(self, timeout_s: float) -> None:
        """Raise RuntimeError with the log's end when it does not answer in time."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.3)
        tail = self._log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the {self.mode.name} server did not get ready; its last lines:\n{tail}")

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> tuple[float, list[dict[str, Any]]]:
        """Greedy generation of one batch; seconds and SGLang's answers."""
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling, **options}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as response:
            payload = response.read()
        seconds = time.perf_counter() - begin
        answers: list[dict[str, Any]] = json.loads(payload)
        return seconds, answers

    def pace(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy generation of a batch; seconds per output token while all of it was decoding, and the tokens.

        Taken between chunks of one answer, so that neither the request's way in nor its prefill is part of it.
        """
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling, "stream": True}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        arrivals: dict[int, list[tuple[float, int]]] = {}
        tokens: dict[int, list[int]] = {}
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                index = chunk.get("index", 0)
                arrivals.setdefault(index, []).append((now, chunk["meta_info"]["completion_tokens"]))
                tokens[index] = chunk["output_ids"]
        return pace_of(arrivals), [tokens[index] for index in sorted(tokens)]

    def profile(self, folder: Path, steps: int) -> None:
        """Record what the device does in the next ``steps`` passes; SGLang writes ``*.json.gz`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        body = json.dumps(
            {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU" if self._cpu else "GPU"]}
        ).encode()
        request = urllib.request.Request(f"{self.url}/start_profile", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60):
            pass

    def flush(self) -> None:
        """Empty the prefix cache. Refused while an answered request is still being put away, so asked again then."""
        for attempt in range(20):
            request = urllib.request.Request(f"{self.url}/flush_cache", b"")
            try:
                with urllib.request.urlopen(request, timeout=60):
                    return
            except urllib.error.HTTPError as error:
                if error.code != 400 or attempt == 19:
                    raise
                time.sleep(0.1)

    def executed(self) -> dict[str, dict[str, dict[str, int]]]:
        """Executed counters, ``{mode: {event: {layer: passes}}}``; empty where the server has no hooks of ours."""
        for _ in range(3):  # a pass publishes what an earlier one copied from the device, at most once a second
            time.sleep(1.05)
            self.generate([[1, 2, 3]], 2)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for event, layer, mode, value in _COUNTER.findall(text):
            counts.setdefault(mode, {}).setdefault(event, {})[layer] = int(float(value))
        return counts

    def stop(self) -> None:
        """End it with all its processes and wait until the GPU's memory is free again."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)  # it has nothing to save, and the next one waits
            self._process.wait(8)
        for _ in range(60):
            if _gpu_megabytes() < 8_000:
                return
            time.sleep(0.5)


def pace_of(arrivals: Mapping[int, Sequence[tuple[float, int]]]) -> float:
    """Seconds per token of the answer that began last, up to the first end of any: then all were decoding.

    Args:
        arrivals: per answer, when a chunk came (seconds) and how many tokens were out then.

    Raises:
        ValueError: the answers hardly overlap.
    """
    last_to_begin = max(arrivals.values(), key=lambda chunks: chunks[0][0])
    first_end = min(chunks[-1][0] for chunks in arrivals.values())
    # The chunks of one step come one after the other, within a fraction of a millisecond.
    shared = [chunk for chunk in last_to_begin if chunk[0] <= first_end + 0.5e-3]
    if len(shared) < 2:
        raise ValueError("the answers of the batch hardly overlap; ask for more tokens")
    (begin, before), (end, after) = shared[0], shared[-1]
    return (end - begin) / (after - before)


def _gpu_megabytes() -> int:
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        query += ["-i", devices] if (devices := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
        return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError):
        return 0
