"""The public package ``kvcache-simulator`` beside our simulator, on a Mooncake trace.

Its definitions differ from a server's: requests run one after the other, may hit their last token and their partial
last block, and leave no answer in the cache. The workload made here is such that ours come to the same.
"""

from __future__ import annotations

import json
import subprocess
import time
import venv
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from radix_cache.simulator import Service, Setting, Workload, simulate
from radix_cache.simulator.flat import flat_workload
from traces.readers.files import open_stream

PACKAGE = "kvcache-simulator==0.1.3"
BLOCK = 512


class Requests(NamedTuple):
    """Prompts in order of the file."""

    tokens: npt.NDArray[np.int64]  # by request
    blocks: npt.NDArray[np.int64]  # by request, the partial one included
    ids: npt.NDArray[np.int64]  # of all blocks, one prompt after the other


class _Line(msgspec.Struct):
    input_length: int
    hash_ids: list[int]


# Run by the package's own interpreter. Its compiled core reads the blocks from a file each time, so what it takes to
# play is the difference to a run that plays nothing, one right after the other: processor seconds, as often as asked.
# ``whole`` is all that it does from the trace on.
_PEER = """
import json, resource, sys, time
from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.trace import parse_trace_file
path, capacities, pairs = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
ensure_cpp_simulator()
trace = parse_trace_file(path, block_size=512)
warm = trace.request_count // 2
def sweep(capacities, policies, trace=trace):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_cpp_sweep(trace, capacities=capacities, policies=policies, warmup_requests=warm)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result
answer = {}
for policy in ("lru", "optimal"):
    began = time.process_time()
    again = parse_trace_file(path, block_size=512)
    child, result = sweep(capacities, [policy], again)
    whole = time.process_time() - began + child
    play = [-sweep([], [policy])[0] + sweep(capacities, [policy])[0] for _ in range(pairs)]
    hits = {str(c): result.results[policy, c].hitTokens for c in capacities}
    answer[policy] = {"play": play, "whole": whole, "hits": hits}
print(json.dumps(answer))
"""


class Own(NamedTuple):
    seconds: float  # processor time of all capacities together
    hits: dict[int, int]  # capacity in blocks -> hit tokens of the second half


def peer_python(folder: Path) -> Path:
    """Interpreter of a virtual environment that has the package; made where it is missing."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True)
        (folder / "ready").touch()
    return python


def run_peer(python: Path, trace: Path, capacities: list[int], pairs: int) -> dict[str, Any]:
    """The package by policy: processor seconds playing and in all, and hit tokens; ``trace`` is a plain ``.jsonl``."""
    command = [str(python), "-c", _PEER, str(trace), json.dumps(capacities), str(pairs)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


def read_requests(path: Path) -> Requests:
    """Lines of a Mooncake trace."""
    decoder = msgspec.json.Decoder(_Line)
    tokens, blocks, ids = array("q"), array("q"), array("q")
    with open_stream(path) as stream:
        for line in map(decoder.decode, stream):
            tokens.append(line.input_length)
            blocks.append(len(line.hash_ids))
            ids.extend(line.hash_ids)
    return Requests(*(np.frombuffer(values, dtype=np.int64) for values in (tokens, blocks, ids)))


def sequential_workload(requests: Requests) -> Workload:
    """One session a request, each one second long, for one client.

    A prompt gets one token more than its blocks hold: the simulator never serves the last token from the cache.
    """
    count = len(requests.tokens)
    nothing = np.zeros(count, dtype=np.int64)
    return flat_workload(BLOCK, requests.blocks * BLOCK + 1, nothing, requests.ids, np.ones(count))


def run_own(workload: Workload, requests: Requests, policy: str, capacities: list[int], rounds: int) -> list[Own]:
    """The same capacities on our simulator, ``rounds`` times."""
    reference = simulate(workload, _setting())
    settings = {c: _setting(c, policy) for c in capacities}
    simulate(workload, settings[capacities[0]], reference=reference)  # compiles the policy
    runs = []
    for _ in range(rounds):
        began = time.process_time()
        outcomes = {c: simulate(workload, setting, reference=reference) for c, setting in settings.items()}
        seconds = time.process_time() - began
        runs.append(Own(seconds, {c: _hit_tokens(requests, o.fates["hit"]) for c, o in outcomes.items()}))
    return runs


def run_whole(path: Path, policy: str, capacities: list[int]) -> Own:
    """From the file ``path`` to the hits: reading, building the workload, the future that belady asks for, playing."""
    began = time.process_time()
    requests = read_requests(path)
    workload = sequential_workload(requests)
    reference = simulate(workload, _setting()) if policy == "belady" else None
    outcomes = {c: simulate(workload, _setting(c, policy), reference=reference) for c in capacities}
    hits = {c: _hit_tokens(requests, o.fates["hit"]) for c, o in outcomes.items()}
    return Own(time.process_time() - began, hits)


def _setting(blocks: int | None = None, policy: str = "lru") -> Setting:
    base = Setting(policy=policy, sessions=1, service=Service.FIXED, insert_output=False)
    # One block more: a running request holds one for the token that was added to its prompt.
    return base if blocks is None else replace(base, capacity=(blocks + 1) * BLOCK)


def _hit_tokens(requests: Requests, hit: npt.NDArray[np.int32]) -> int:
    """Hit tokens of the second half of the requests; of a partial block its tokens count."""
    start = len(hit) // 2
    return int(np.minimum(hit[start:], requests.tokens[start:]).sum())
