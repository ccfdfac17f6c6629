"""The public package ``kvcache-simulator`` beside our simulator, on a Mooncake trace.

Its definitions differ from a server's: requests run one after the other, may hit their last token and their partial
last block, and leave no answer in the cache. The workload made here is such that ours come to the same.
"""

from __future__ import annotations

import json
import subprocess
import time
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from radix_cache.simulator import FlowSpec, Service, Setting, TurnSpec, Workload, WorkloadBuilder, simulate
from traces.readers.files import open_stream

PACKAGE = "kvcache-simulator==0.1.3"
BLOCK = 512
Requests = list[tuple[int, list[int]]]  # (prompt tokens, ids of its blocks, the partial one included)

# Run by the package's own interpreter: processor seconds of its compiled core, which reads blocks from a file.
_PEER = """
import json, resource, sys
from kvcache_sim.cpp_backend import ensure_cpp_simulator, run_cpp_sweep
from kvcache_sim.trace import parse_trace_file
path, capacities, rounds = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
ensure_cpp_simulator()
trace = parse_trace_file(path, block_size=512)
warm = trace.request_count // 2
def sweep(capacities, policies):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = run_cpp_sweep(trace, capacities=capacities, policies=policies, warmup_requests=warm)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, result
answer = {"load": [sweep([], ["lru"])[0] for _ in range(rounds)]}
for policy in ("lru", "optimal"):
    runs = [sweep(capacities, [policy]) for _ in range(rounds)]
    hits = {str(c): runs[-1][1].results[policy, c].hitTokens for c in capacities}
    answer[policy] = {"seconds": [seconds for seconds, _ in runs], "hits": hits}
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


def run_peer(python: Path, trace: Path, capacities: list[int], rounds: int) -> dict[str, Any]:
    """Processor seconds and hit tokens of the package; ``trace`` is a plain ``.jsonl``."""
    command = [str(python), "-c", _PEER, str(trace), json.dumps(capacities), str(rounds)]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return answer


def read_requests(path: Path) -> Requests:
    """Lines of a Mooncake trace, in order of the file."""
    with open_stream(path) as stream:
        return [(line["input_length"], line["hash_ids"]) for line in map(orjson.loads, stream)]


def sequential_workload(requests: Iterable[tuple[int, list[int]]]) -> Workload:
    """One session a request, each one second long, for one client.

    A prompt gets one token more than its blocks hold: the simulator never serves the last token from the cache.
    """
    builder = WorkloadBuilder(BLOCK, global_ids=True)
    nothing = np.empty(0, np.int64)
    for number, (_, ids) in enumerate(requests):
        turn = TurnSpec(len(ids) * BLOCK + 1, 0, np.array(ids, dtype=np.int64), nothing, service_s=1.0)
        builder.add(str(number), [FlowSpec([turn])])
    return builder.build()


def run_own(workload: Workload, requests: Requests, policy: str, capacities: list[int], rounds: int) -> list[Own]:
    """The same capacities on our simulator, ``rounds`` times."""
    base = Setting(sessions=1, service=Service.FIXED, insert_output=False)
    reference = simulate(workload, base)
    # One block more: a running request holds one for the token that was added to its prompt.
    settings = {
        c: Setting(policy=policy, capacity=(c + 1) * BLOCK, sessions=1, service=Service.FIXED, insert_output=False)
        for c in capacities
    }
    simulate(workload, settings[capacities[0]], reference=reference)  # compiles the policy
    runs = []
    for _ in range(rounds):
        began = time.process_time()
        outcomes = {c: simulate(workload, setting, reference=reference) for c, setting in settings.items()}
        seconds = time.process_time() - began
        runs.append(Own(seconds, {c: _hit_tokens(requests, o.fates["hit"]) for c, o in outcomes.items()}))
    return runs


def _hit_tokens(requests: Requests, hit: npt.NDArray[np.int32]) -> int:
    """Hit tokens of the second half of the requests; of a partial block its tokens count."""
    start = len(requests) // 2
    return sum(min(h, tokens) for h, (tokens, _) in zip(hit[start:].tolist(), requests[start:], strict=True))
