"""Which kernels a decode step of index reuse runs, and how long: ``gpu_run.sh eval.bench.index_reuse_kernels``.

First the one kernel of a reusing layer against SGLang's two, on random rows: bits equal, and time. Then servers of
three modes (*shared*; *skipped* with SGLang's two kernels; *skipped*) answer behind a cached prompt while SGLang's
profiler records some steps; the kernels of one step are summed by name. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from eval.bench.gpu_frame import out_file, prompt
from eval.bench.gpu_server import DEEP, TINY
from eval.bench.index_reuse_server import BenchServer, Mode

MODES = (Mode("shared"), Mode("skipped", separate_store=True), Mode("skipped"))
STEPS = 20


def compare_store(tokens: int) -> dict[str, Any]:
    """SGLang's norm-and-RoPE kernel and store kernel against the one kernel: unequal elements, and µs in a graph."""
    from sglang.kernels.ops.attention.minimax_qknorm_rope import minimax_qknorm_rope
    from sglang.kernels.ops.kvcache.kvcache import store_cache

    from agentserve.runtime.triton_fused_store import norm_rope_store

    q_heads, kv_heads, slots_total = 64, 4, tokens + 64
    make = torch.Generator("cuda").manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device="cuda").bfloat16()

    qkv = random(tokens, (q_heads + 2 * kv_heads) * 128)
    q_weight, k_weight = random(128) / 8, random(128) / 8
    angle = torch.arange(131_072, device="cuda")[:, None] * 1e6 ** (-torch.arange(32, device="cuda") / 32)
    cos_sin = torch.cat([angle.cos(), angle.sin()], 1).float().contiguous()
    positions = torch.randint(0, 131_072, (tokens,), generator=make, device="cuda")
    slots = torch.randperm(slots_total, generator=make, device="cuda")[:tokens]
    caches = [torch.zeros(slots_total, kv_heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    work = qkv.clone()

    def two() -> torch.Tensor:
        minimax_qknorm_rope(work, q_weight, k_weight, cos_sin, positions, q_heads, kv_heads, kv_heads, 1e-6)
        q, k, v = torch.split(work, [q_heads * 128, kv_heads * 128, kv_heads * 128], dim=-1)
        flat = [cache.view(-1, kv_heads * 128) for cache in caches[:2]]
        store_cache(k, v, *flat, slots, row_bytes=kv_heads * 256, v_row_bytes=kv_heads * 256, size_limit=slots_total)
        return q

    def one() -> torch.Tensor:
        return norm_rope_store(qkv, q_weight, k_weight, cos_sin, positions, slots, *caches[2:], eps=1e-6, pdl=True)

    q_two, q_one = two().clone(), one()
    for cache in caches:
        cache[0] = 0  # where padding goes, which SGLang's kernel leaves out
    unequal = sum(int((a != b).sum()) for a, b in ((q_two, q_one), (caches[0], caches[2]), (caches[1], caches[3])))
    times: dict[str, list[float]] = {"two": [], "one": []}
    graphs = {}
    for name, call in (("two", two), ("one", one)):
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(100):
                call()
    for _ in range(10):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 10)  # ms of 100 calls to us of one
    return {
        "tokens": tokens,
        "elements": q_one.numel() + 2 * tokens * kv_heads * 128,
        "unequal": unequal,
        "us": {name: round(statistics.median(values), 3) for name, values in times.items()},
    }


def step_kernels(trace: Path) -> dict[str, Any]:
    """From a profiler trace: by kernel name, launches and µs of a step; and the step's span in µs."""
    with gzip.open(trace, "rt") as lines:
        events = json.load(lines)["traceEvents"]
    kernels = sorted(
        (event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in ("kernel", "gpu_memcpy")
    )
    if not kernels:
        return {"kernels": 0}
    totals: dict[str, list[float]] = defaultdict(list)
    for _, duration, name in kernels:
        totals[name].append(duration)
    span = kernels[-1][0] + kernels[-1][1] - kernels[0][0]
    # The first kernels in order, so that what follows what can be read.
    middle = len(kernels) // 2
    return {
        "kernels": len(kernels),
        "span_us": span,
        "busy_us": sum(duration for _, duration, _ in kernels),
        "by_name": {
            name[:140]: {"launches": len(values), "us": round(sum(values), 1), "median_us": statistics.median(values)}
            for name, values in sorted(totals.items(), key=lambda item: -sum(item[1]))[:40]
        },
        "order": [
            [round(ts - kernels[middle][0], 2), dur, name[:80]] for ts, dur, name in kernels[middle : middle + 90]
        ],
    }


def wait_for_trace(folder: Path) -> list[Path]:
    """The finished trace in ``folder``; empty when none comes in half a minute."""
    for _ in range(100):
        found = sorted(folder.glob("**/*.json.gz"))
        size = found[0].stat().st_size if found else 0
        time.sleep(0.3)
        if size and found[0].stat().st_size == size:
            return found
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--freq", type=int, default=4)
    parser.add_argument("--length", type=int, default=120_000)
    parser.add_argument("--cpu", action="store_true", help="the tiny M3 on a CPU, to try the benchmark itself")
    parser.add_argument("--store-only", action="store_true", help="only the kernel, no server")
    arguments = parser.parse_args()
    out = out_file("index-reuse-kernels.json")
    result: dict[str, Any] = {
        "command": "bash eval/bench/gpu_run.sh eval.bench.index_reuse_kernels " + " ".join(sys.argv[1:])
    }
    folder = Path(tempfile.mkdtemp(prefix="kernels-"))
    begin = time.monotonic()
    try:
        if not arguments.cpu:
            result["store"] = [compare_store(tokens) for tokens in (1, 8, 64, 256, 4_096)]
            print(result["store"], flush=True)
        if arguments.store_only:
            return
        shape = TINY if arguments.cpu else DEEP
        ids = prompt(600 if arguments.cpu else arguments.length, 0, shape.vocab_size)
        for place, mode in enumerate(MODES[-1:] if arguments.cpu else MODES):
            server = BenchServer(folder / str(place), mode, freq=arguments.freq, cpu=arguments.cpu, shape=shape)
            server.open_gate()
            try:
                server.wait_ready(300)
                print(f"{time.monotonic() - begin:.0f} s: {mode} ready", flush=True)
                server.generate([ids], 8)
                paces = [server.pace([ids], 257)[0] for _ in range(3)]
                traces = folder / f"trace-{place}"
                with ThreadPoolExecutor(1) as pool:
                    answering = pool.submit(server.generate, [ids], 100 if arguments.cpu else 1_500)
                    time.sleep(0.5)  # the cached prompt is behind it, steps are decode
                    server.profile(traces, STEPS)
                    _, answers = answering.result()
                found = wait_for_trace(traces)
                result[str(mode)] = {
                    "ms_per_token": [round(pace * 1e3, 4) for pace in paces],
                    "tokens": answers[0]["output_ids"][:8],
                    "executed": server.executed().get("decode"),
                    **(step_kernels(found[0]) if found else {"kernels": None}),
                }
                print(f"{time.monotonic() - begin:.0f} s: {mode}: {result[str(mode)]['ms_per_token']}", flush=True)
            finally:
                server.stop()
                out.write_text(json.dumps(result))
    finally:
        out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
