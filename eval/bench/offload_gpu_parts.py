"""What ``eval.bench.offload_gpu`` measures with beside its servers: a daemon, plain copies, the size of the state."""

from __future__ import annotations

import json
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from eval.bench.gpu_server import answers
from offload.daemon import DaemonSpec, daemon_command
from offload.state import prefix_state_planes

PAGE, CHUNK = 128, 256
# The program where nothing is installed.
LMCACHE = "import sys; from lmcache.cli.main import main; sys.exit(main())"


def write_checkpoint(folder: Path, config: Mapping[str, Any]) -> Path:
    """A config, and one tensor to tell the weights by: the random ones of a benchmark are made in the server."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"seed": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    return folder


def state_bytes(target: Mapping[str, Any], draft: Mapping[str, Any] | None, tp: int, dtype: str) -> int:
    """Bytes that one rank stores per token: K, V, index K and a draft's K and V (a page's seal adds an eighth).

    Args:
        target: config of the model.
        draft: config of its EAGLE3 draft, or None.
        tp: ranks.
        dtype: element type of all of it.
    """
    planes = prefix_state_planes(target, kv_dtype=dtype, index_dtype=dtype, tp=tp, draft_config=draft)
    return sum(plane.bytes_per_token for plane in planes)


class Daemon:
    """``lmcache server``, started without its script: an unpacked archive has none that runs.

    Args:
        log: its output.
        port: of its requests.
        http_port: of its health.
        memory_gb: of host memory.
    """

    def __init__(self, log: Path, port: int, http_port: int, *, memory_gb: float) -> None:
        spec = DaemonSpec("127.0.0.1", port, http_port, CHUNK, memory_gb)
        argv = [sys.executable, "-c", LMCACHE, *daemon_command(spec, program="lmcache")[1:]]
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "OMP_NUM_THREADS": "1"}
        env.pop("LMCACHE_CONFIG_FILE", None)
        self._health, self._log = f"http://127.0.0.1:{http_port}/healthcheck", log
        self._process = subprocess.Popen(argv, env=env, stdout=log.open("wb"), stderr=subprocess.STDOUT)

    def wait_ready(self, timeout_s: float) -> None:
        """Raises RuntimeError when it does not get healthy in time."""
        if not answers(self._health, self._process, timeout_s):
            raise RuntimeError(f"the daemon did not get healthy in {timeout_s:.0f} s (exit {self._process.poll()})")

    def tail(self) -> str:
        return self._log.read_text(errors="replace")[-2500:]

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)


def plain_copies(tokens: int, bytes_per_token: int, *, cpu: bool) -> dict[str, Any]:
    """Copies of a prefix's bytes between pinned host memory and the device, and sealing as many; own process.

    Returns:
        GB/s both ways of one contiguous copy, seconds and GB/s of checksums over the same bytes in pages, and whether
        the device's checksums equal the host's.
    """
    code = f"from eval.bench.offload_gpu_parts import measure_copies as m; m({tokens}, {bytes_per_token}, {cpu})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"measuring copies failed: {done.stderr[-1500:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_copies(tokens: int, bytes_per_token: int, cpu: bool) -> None:
    """Prints what ``plain_copies`` returns."""
    import torch

    from offload.seal import Sealer, new_seals, pages_of

    device = torch.device("cpu" if cpu else "cuda")
    # Two planes make up the bytes of all: how many there are hardly matters to a copy or a sum.
    width = bytes_per_token // 4 // 8 * 8
    planes = [torch.zeros(tokens, 1, width, dtype=torch.int16, device=device) for _ in range(2)]
    for plane in planes:
        plane.view(torch.int64).random_()
    size = sum(plane.numel() * plane.element_size() for plane in planes)
    host = torch.empty(size // 8, dtype=torch.int64, pin_memory=not cpu)
    there = torch.empty(size // 8, dtype=torch.int64, device=device)

    def speed(work: Callable[[], object]) -> float:
        seconds = []
        for _ in range(6):
            if not cpu:
                torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            if not cpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    up = speed(lambda: there.copy_(host, non_blocking=True))
    down = speed(lambda: host.copy_(there, non_blocking=True))
    seals = new_seals(tokens // PAGE, device)
    sealer = Sealer(planes, seals, PAGE, "benchmark")
    pages = pages_of(torch.arange(tokens, device=device), PAGE)
    sealing = speed(lambda: sealer.checksums(pages))
    few = min(64, len(pages))
    on_host = Sealer([plane[: few * PAGE].cpu() for plane in planes], new_seals(few, "cpu"), PAGE, "benchmark")
    equal = torch.equal(on_host.checksums(torch.arange(few)), sealer.checksums(pages[:few]).cpu())
    print(json.dumps({
        "bytes": size, "host_to_device_gb_per_s": round(size / up / 1e9, 2),
        "device_to_host_gb_per_s": round(size / down / 1e9, 2), "seal_seconds": round(sealing, 5),
        "seal_gb_per_s": round(size / sealing / 1e9, 2), "seals_equal_the_hosts": equal,
    }))  # fmt: skip
