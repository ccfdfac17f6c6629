"""How fast the simulator is: block accesses a second and memory on real sessions, and the public package beside it.

``python -m eval.bench.simulator_speed TRACES`` reads ``weka-claude-code.tar.xz`` and
``mooncake-conversation.jsonl.xz`` in the folder TRACES. A block access is one block of one prompt that a request
looks at. Times are processor seconds, since a shared machine's clock also counts its neighbours; compiling is not
among them (it is done once and kept on disk), reading a trace neither, but for ``from_the_file_on``: reading a plain
``.jsonl``, indexing and playing it, imports apart. Memory is the peak resident set of a process
that does all of it: interpreter, libraries and their code, reading the archive, playing it.
"""

from __future__ import annotations

import json
import lzma
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from eval.bench.simulator_peer import (
    peer_python,
    read_requests,
    run_own,
    run_peer,
    run_whole,
    sequential_workload,
)
from eval.bench.simulator_workload import workload_from_sessions
from radix_cache.simulator import Setting, simulate
from radix_cache.simulator.run import unbounded
from traces import open_trace

WEKA, MOONCAKE = "weka-claude-code.tar.xz", "mooncake-conversation.jsonl.xz"
WANTED_PER_S, WANTED_MB, WANTED_RATIO = 300e6, 200.0, 10.0  # issue 3
CAPACITIES = [2000, 4000, 8000]  # blocks of 512 tokens


def weka(path: str, rounds: int) -> dict[str, Any]:
    """LRU at capacity 1.0 of the live contexts, in this process."""
    workload = workload_from_sessions(open_trace(path))
    base = Setting(policy="lru", sessions=28, think_cap=60.0, order_seed=0)
    reference = simulate(workload, unbounded(base))
    setting = replace(base, capacity=int(reference.mean_context))
    theoretical = reference.rate
    del reference  # and what became of each of its requests
    seconds, hits = [], []
    for _ in range(rounds + 1):  # the first one compiles
        began = time.process_time()
        hits.append(simulate(workload, setting).hit_tokens)
        seconds.append(time.process_time() - began)
    median = statistics.median(seconds[1:])
    return {
        "block_accesses": workload.accesses,
        "requests": len(workload.requests),
        "seconds_median": round(median, 4),
        "million_accesses_per_s_median": round(workload.accesses / median / 1e6),
        "million_accesses_per_s_best": round(workload.accesses / min(seconds[1:]) / 1e6),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "hit_rate": round(hits[-1] / workload.prompt_tokens, 6),
        "theoretical_rate": round(theoretical, 6),
        "same_hits_in_all_rounds": len(set(hits)) == 1,
    }


def in_own_process(path: Path, rounds: int) -> dict[str, Any]:
    """``weka`` in a process that does nothing else; a first one has compiled what is not on disk yet."""
    code = f"import json; from eval.bench.simulator_speed import weka; print(json.dumps(weka({str(path)!r}, {rounds})))"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def mooncake(path: Path, python: Path, rounds: int) -> dict[str, Any]:
    """Both simulators on one trace, the same capacities, in turn."""
    requests = read_requests(path)
    workload = sequential_workload(requests)
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        peer = run_peer(python, plain, CAPACITIES, rounds)
        whole = {p: [run_whole(plain, p, CAPACITIES) for _ in range(3)] for p in ("lru", "belady")}
    load = statistics.median(peer["load"])
    result: dict[str, Any] = {"capacities_in_blocks": CAPACITIES, "block_accesses": workload.accesses}
    for policy, name in (("lru", "lru"), ("belady", "optimal")):
        runs = run_own(workload, requests, policy, CAPACITIES, rounds)
        theirs = statistics.median(peer[name]["seconds"]) - load  # what it does beside reading and indexing
        own = statistics.median(run.seconds for run in runs)
        hits = {str(c): h for c, h in runs[-1].hits.items()}
        result[policy] = {
            "seconds": {"kvcache-simulator": round(theirs, 4), "own": round(own, 4)},
            "times_as_fast": round(theirs / own, 2),
            "from_the_file_on": _from_the_file_on(peer[name]["whole"], [run.seconds for run in whole[policy]]),
            "hit_tokens": {"kvcache-simulator": peer[name]["hits"], "own": hits},
            "same_hits": peer[name]["hits"] == hits,
        }
        assert whole[policy][-1].hits == runs[-1].hits
    return result


def _from_the_file_on(theirs: list[float], own: list[float]) -> dict[str, Any]:
    peer, ours = statistics.median(theirs), statistics.median(own)
    seconds = {"kvcache-simulator": round(peer, 4), "own": round(ours, 4)}
    return {"seconds": seconds, "times_as_fast": round(peer / ours, 2)}


@click.command()
@click.argument("traces", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=9, show_default=True)
@click.option(
    "--peer-venv", default=Path(".cache/kvcache-simulator"), show_default=True, type=click.Path(path_type=Path)
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result as JSON.")
def main(traces: Path, rounds: int, peer_venv: Path, out: Path | None) -> None:
    """Speed and memory of the simulator on the traces in the folder TRACES."""
    for name in (WEKA, MOONCAKE):
        if not (traces / name).exists():
            raise click.UsageError(f"{traces} has no {name}; name the folder that holds both traces")
    result = {
        "command": f"python -m eval.bench.simulator_speed TRACES --rounds {rounds}",
        "wanted": {"accesses_per_s": WANTED_PER_S, "memory_mb": WANTED_MB, "times_as_fast": WANTED_RATIO},
        "weka": in_own_process(traces / WEKA, rounds),
        "mooncake": mooncake(traces / MOONCAKE, peer_python(peer_venv), rounds),
    }
    text = json.dumps(result, indent=2)
    click.echo(text)
    if out is not None:
        out.write_text(text + "\n")


if __name__ == "__main__":
    main()
