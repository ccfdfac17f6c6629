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
NAMES = {"lru": "lru", "belady": "optimal"}  # ours and the package's
PAIRS, REPETITIONS = 3, 15  # of the package and of ours in a round


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
    """Both simulators on one trace and the same capacities, in turn: ``rounds`` times one right after the other.

    A ratio is one of a round, in which both had the same machine; stated are the median and the quartiles of these.
    """
    requests = read_requests(path)
    workload = sequential_workload(requests)
    theirs, own, whole = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.jsonl"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        for _ in range(rounds):
            theirs.append(run_peer(python, plain, CAPACITIES, PAIRS))
            own.append({p: run_own(workload, requests, p, CAPACITIES, REPETITIONS) for p in NAMES})
            whole.append({p: run_whole(plain, p, CAPACITIES) for p in NAMES})
    result: dict[str, Any] = {"capacities_in_blocks": CAPACITIES, "block_accesses": workload.accesses}
    for policy, name in NAMES.items():
        hits = [{str(c): h for c, h in run.hits.items()} for runs in own for run in runs[policy]]
        assert all(one == hits[0] for one in hits)
        assert all(runs[policy].hits == own[0][policy][0].hits for runs in whole)
        peer = theirs[0][name]["hits"]
        result[policy] = {
            "playing": _beside(
                [statistics.median(one[name]["play"]) for one in theirs],
                [statistics.median(run.seconds for run in runs[policy]) for runs in own],
            ),
            "from_the_file_on": _beside([one[name]["whole"] for one in theirs], [r[policy].seconds for r in whole]),
            "hit_tokens": {"kvcache-simulator": peer, "own": hits[0]},
            "same_hits": peer == hits[0],
        }
    return result


def _beside(theirs: list[float], own: list[float]) -> dict[str, Any]:
    """Medians over rounds in processor seconds, and how the ratios of the rounds lie."""
    ratios = sorted(a / b for a, b in zip(theirs, own, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    seconds = {"kvcache-simulator": round(statistics.median(theirs), 4), "own": round(statistics.median(own), 4)}
    return {
        "seconds": seconds,
        "times_as_fast": round(middle, 2),
        "times_as_fast_quartiles": [round(low, 2), round(high, 2)],
        "rounds": len(ratios),
    }


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
