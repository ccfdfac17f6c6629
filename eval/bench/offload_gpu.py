"""A long prefix on a GPU, computed, restored from LMCache and still there: ``bash eval/bench/gpu_run.sh
eval.bench.offload_gpu`` prints one JSON object.

Layers of MiniMax-M3's real shapes with random weights (six of sixty), a daemon on the same machine that reaches the KV
pool through CUDA IPC. Each round takes a new prompt of each length through all three ways in turn. Beside the times
to the first token stand the bytes that a restore moves and its speed against plain copies between pinned host memory
and the GPU measured in the same call, and what makes the times worth something: where the tokens came from, that every
restored page passed its seal, and that restored answers are those of the device's own cache. A second server then
restores what the first one stored. ``--cpu`` runs the same script on the tiny M3, ``--ranks 2`` on two GPUs; with
``--eagle3`` the servers draft (real verification, random drafts), and the draft's K and V are part of every prefix;
``--kv-dtype fp8_e4m3`` keeps K, V and index K in FP8.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape
from agentserve.runtime.speculation import SpeculationSettings
from eval.bench.eagle3_server import REAL_DRAFT, draft_options
from eval.bench.gpu_frame import Record, options, out_file, plugin_path, prompt, python_path
from eval.bench.gpu_server import REAL, TINY, GpuServer, free_ports
from eval.bench.index_reuse_summary import chosen_otherwise
from eval.bench.offload_gpu_parts import CHUNK, Daemon, plain_copies, state_bytes, write_checkpoint
from eval.bench.offload_restore import WAYS, counted, difference, flush, generate
from offload.lmcache_copies import cuda_copies_problem
from offload.settings import OffloadSettings

DRAFTS = 3
# Whole chunks and one token: a hit on the device and a restored one then leave the same single token to compute.
LENGTHS = {"cpu": (4 * CHUNK + 1, 12 * CHUNK + 1), "gpu": (125 * CHUNK + 1, 469 * CHUNK + 1)}


class Served(NamedTuple):
    """What the servers of a call run.

    Attributes:
        checkpoint: a folder with a config, the same for all servers: its path and files are part of the key.
        draft: a draft's shape and its checkpoint, or None.
        kv_dtype: element type of the KV cache, or ``auto``.
        ranks: GPUs to share the model.
        cpu: the tiny shape on this project's CPU platform, to try the benchmark itself.
    """

    checkpoint: Path
    draft: tuple[TinyDraftShape, Path] | None
    kv_dtype: str
    ranks: int
    cpu: bool


class OffloadServer(GpuServer):
    """A starting or running server with offload.

    Args:
        served: what it runs.
        folder: for its gate and log.
        settings: which daemon, and how long anything waits.
    """

    def __init__(self, served: Served, folder: Path, settings: OffloadSettings) -> None:
        options = ["--max-total-tokens", "8192"] if served.cpu else [
            "--cuda-graph-bs-decode", "1", "--mem-fraction-static", "0.8", "--max-total-tokens", "262144"
        ]  # fmt: skip
        options += ["--max-running-requests", "4", "--enable-cache-report", "--enable-lmcache"]
        options += ["--kv-cache-dtype", served.kv_dtype]
        environment = settings.environment()
        if served.draft is not None:
            shape, draft = served.draft
            options += draft_options(draft, DRAFTS, cpu=served.cpu)
            environment |= SpeculationSettings(layers=shape.capture_layers).environment()
            weights = plugin_path(folder / "path", "eagle3_bench", "eval.bench.eagle3_weights:register")
            environment["PYTHONPATH"] = python_path(weights)
        super().__init__(
            folder, served.checkpoint, options, environment, cpu=served.cpu, ranks=served.ranks, name="offloading"
        )

    def stop(self) -> None:
        """Let it take leave of the daemon, which would hold its memory for a minute otherwise; then as any server."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        super().stop()


def waited(http: httpx.Client) -> float:
    """Seconds that rank 0's scheduler has waited for loads, their verification included."""
    pattern = r'^agentserve_offload_seconds_total\{[^}]*rank="0"[^}]*wait="load"[^}]*\} (\S+)$'
    return sum(float(value) for value in re.findall(pattern, http.get("/metrics").text, re.MULTILINE))


def where(answer: dict[str, Any]) -> dict[str, int]:
    """Cached tokens of an answer by where they came from."""
    details = answer["meta_info"].get("cached_tokens_details") or {}
    storage = int(details.get("storage", 0))
    return {"device": int(answer["meta_info"]["cached_tokens"]) - storage, "storage": storage}


class Session:
    """Daemons, one a rank, and two servers after each other.

    Args:
        folder: for checkpoints and logs.
        record: where what is found goes, and how long everything may take.
        rounds: new prompts of each length.
        ranks: GPUs to share the model.
        eagle3: the servers draft.
        kv_dtype: element type of the KV cache, or ``auto``.
        cpu: the tiny M3 on a CPU.
    """

    def __init__(
        self, folder: Path, record: Record, *, rounds: int, ranks: int, eagle3: bool, kv_dtype: str, cpu: bool
    ) -> None:
        self._folder, self._record, self._rounds, self._ranks, self._cpu = folder, record, rounds, ranks, cpu
        shape = TINY if cpu else REAL
        self._vocabulary = shape.vocab_size
        config, checkpoint = shape.hf_config(bos_id=0, eos_id=1), folder / "m3"
        write_checkpoint(checkpoint, config)
        draft, draft_config = None, None
        if eagle3:
            drafting = TinyDraftShape(TINY) if cpu else REAL_DRAFT
            draft_config = drafting.hf_config()
            draft = drafting, write_checkpoint(folder / "draft", draft_config)
        self._served = Served(checkpoint, draft, kv_dtype, ranks, cpu)
        self._lengths = LENGTHS["cpu" if cpu else "gpu"]
        self._bytes = state_bytes(config, draft_config, ranks, shape.dtype if kv_dtype == "auto" else kv_dtype)
        self._answers: list[tuple[list[int], dict[str, Any]]] = []  # prompts of the last round, answered from a hit
        ports = free_ports(2 * ranks)
        # Long ones: the first store of a length lets the daemon's memory grow, which is not what is measured.
        self._settings = OffloadSettings(
            port=ports[0], rank_addresses=tuple(f"127.0.0.1:{port}" for port in ports[:ranks]) if ranks > 1 else (),
            chunk_tokens=CHUNK, lookup_deadline=20.0, load_deadline=30.0, store_deadline=60.0,
            ping_deadline=10.0, register_deadline=60.0,
        )  # fmt: skip
        self._daemons = [
            Daemon(folder / f"daemon-{port}.log", port, http_port, memory_gb=1.0 if cpu else 12.0)
            for port, http_port in zip(ports[:ranks], ports[ranks:], strict=True)
        ]
        record.found |= {
            "layers": shape.num_layers, "tp": ranks, "eagle3": eagle3, "kv_dtype": kv_dtype, "chunk_tokens": CHUNK,
            "bytes_per_token_and_rank": self._bytes,
        }  # fmt: skip

    def run(self) -> None:
        """Raises RuntimeError when something does not start, or when nothing can be restored."""
        server = self._start("first")
        following: OffloadServer | None = None
        try:
            self._record.found["plain_copies"] = plain_copies(
                self._tokens(self._lengths[-1]), self._bytes, cpu=self._cpu
            )
            self._record.note(f"plain copies: {self._record.found['plain_copies']}")
            for daemon in self._daemons:
                daemon.wait_ready(min(90.0, self._record.left()))
            self._open(server)
            with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
                self._warm_up(http)
                following = self._start("second")  # imports meanwhile, and waits at its gate
                for length in self._lengths:
                    self._measure(http, length)
            chosen = server.configurations()
            server.stop()
            if self._record.left() > (60 if self._cpu else 90):
                self._open(following)
                with httpx.Client(base_url=following.url, timeout=120, trust_env=False) as http:
                    self._after_restart(http)
                self._record.found["configurations"] = chosen_otherwise(chosen, following.configurations())
        except (RuntimeError, OSError, httpx.HTTPError) as error:
            tails = {"daemon": self._daemons[0].tail(), "server": server.tail()}
            raise RuntimeError(
                f"{error}\n" + "\n".join(f"--- {name}:\n{tail}" for name, tail in tails.items())
            ) from None
        finally:
            for running in (server, following):
                if running is not None:
                    running.stop()
            for daemon in self._daemons:
                daemon.stop()

    def _start(self, name: str) -> OffloadServer:
        return OffloadServer(self._served, self._folder / name, self._settings)

    def _open(self, server: OffloadServer) -> None:
        server.open_gate()
        server.wait_ready(self._record.left())
        self._record.note("server ready")

    def _prompt(self, length: int, seed: int) -> list[int]:
        return prompt(length, seed, self._vocabulary)

    def _tokens(self, length: int) -> int:
        return length // CHUNK * CHUNK

    def _warm_up(self, http: httpx.Client) -> None:
        """Compiles kernels and grows the daemon's memory; the first restore tells whether this works at all."""
        for length in (self._lengths[0], self._lengths[-1]):
            ids = self._prompt(length, -1)
            generate(http, ids)
            flush(http)
            _, answer = generate(http, ids)
            self._record.note(f"warm-up of {length}: {where(answer)}")
            if where(answer)["storage"] != self._tokens(length):
                raise RuntimeError(f"{length} tokens were stored, and restored were {where(answer)}")
            flush(http)

    def _measure(self, http: httpx.Client, length: int) -> None:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        loads, found = [], {way: set() for way in WAYS}  # type: list[float], dict[str, set[str]]
        worst_of_hits = worst_of_all = 0.0
        before = {event: counted(http, event) for event in ("restored", "verified", "refused")}
        for number in range(self._rounds):
            ids, answers = self._prompt(length, number), {}
            # Computed, then a hit on the device, then flushed and restored: the daemon has stored it by then.
            for way in ("computed", "device", "restored"):
                if way == "restored":
                    flush(http)
                    loaded = waited(http)
                seconds[way].append((timed := generate(http, ids))[0])
                answers[way] = timed[1]
                found[way].add(json.dumps(where(timed[1])))
            loads.append(waited(http) - loaded)
            worst_of_hits = max(worst_of_hits, difference([answers["device"], answers["restored"]]))
            worst_of_all = max(worst_of_all, difference(list(answers.values())))
            flush(http)
        self._answers.append((ids, answers["device"]))
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        moved, load = self._tokens(length) * self._bytes, statistics.median(loads)
        speed = moved / load / 1e9
        self._record.found.setdefault("lengths", {})[str(length)] = {
            "seconds_to_first_token": {way: [round(value, 4) for value in values] for way, values in seconds.items()},
            "computed_over_restored": round(medians["computed"] / medians["restored"], 2),
            "restored_over_device": round(medians["restored"] / medians["device"], 2),
            "seconds_of_loads": [round(value, 4) for value in loads],
            "bytes_of_a_restore_and_rank": moved,
            "load_gb_per_s": round(speed, 2),
            "load_over_plain_copy": round(speed / self._record.found["plain_copies"]["host_to_device_gb_per_s"], 3),
            "cached_tokens": {way: sorted(values) for way, values in found.items()},
            "restored_and_device_same_tokens": worst_of_hits != float("inf"),
            "largest_logprob_difference_restored_device": worst_of_hits if worst_of_hits != float("inf") else None,
            # Computed in other chunks than a hit's single token: in bf16 a sum may round another way.
            "computed_and_device_same_tokens": worst_of_all != float("inf"),
            **{f"tokens_{event}": counted(http, event) - before[event] for event in before},
        }
        self._record.note(f"{length}: {self._record.found['lengths'][str(length)]}")

    def _after_restart(self, http: httpx.Client) -> None:
        """Each last prompt, restored twice by a server that never computed it, against the first server's answer.

        First a prompt that is only hit on the device, twice: the first hit chooses the configurations of its kernels.
        """
        hits = [generate(http, self._prompt(CHUNK * 4 + 1, -2))[1] for _ in range(3)][1:]
        self._record.found["first_hit_against_second"] = difference(hits)
        self._record.found["after_engine_restart"] = restored = []
        for ids, known in self._answers:
            seconds, answer = generate(http, ids)
            flush(http)
            _, again = generate(http, ids)
            restored.append({
                "tokens": where(answer), "seconds_to_first_token": round(seconds, 4),
                "largest_logprob_difference": difference([known, answer]),
                "again": {"tokens": where(again), "largest_logprob_difference": difference([answer, again])},
                "log_probabilities": [
                    [step[:2] for step in given["meta_info"]["output_token_logprobs"]]
                    for given in (known, answer, again)
                ],
            })  # fmt: skip
        self._record.found["after_engine_restart_counted"] = {
            event: counted(http, event) for event in ("restored", "verified", "refused")
        }
        self._record.note(f"after restart: {restored}")


def good(result: dict[str, Any]) -> bool:
    """Whether everything that was restored was right, and everything asked for was restored."""
    cells = result.get("lengths", {})
    restart = result.get("after_engine_restart", [])
    return (
        bool(cells)
        and all(
            cell["tokens_refused"] == 0
            and cell["tokens_verified"] == cell["tokens_restored"] > 0
            and cell["largest_logprob_difference_restored_device"] == 0.0
            and cell["cached_tokens"]["restored"]
            == [json.dumps({"device": 0, "storage": int(length) // CHUNK * CHUNK})]
            for length, cell in cells.items()
        )
        and len(restart) == len(cells)
        and all(cell["tokens"]["storage"] > 0 and cell["largest_logprob_difference"] < 0.05 for cell in restart)
    )


def main() -> None:
    parser = options(__doc__, budget_s=500)
    parser.add_argument("--rounds", type=int, default=3, help="new prompts of each length")
    parser.add_argument("--eagle3", action="store_true", help="with a draft")
    parser.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="of K, V and index K")
    chosen = parser.parse_args()
    if not chosen.cpu and (problem := cuda_copies_problem()) is not None:
        sys.exit(f"LMCache's compiled copies do not load {problem}; see eval/bench/gpu_run.sh")
    kinds = (f"-tp{chosen.ranks}", chosen.ranks > 1), ("-eagle3", chosen.eagle3), ("-fp8", chosen.kv_dtype != "auto")
    out = out_file(f"offload-h200{''.join(kind for kind, asked in kinds if asked)}.json")
    record = Record("eval.bench.offload_gpu", out, chosen.budget, machine="cpu" if chosen.cpu else "gpu")
    failure = None
    with tempfile.TemporaryDirectory(prefix="offload-") as folder:
        try:
            Session(
                Path(folder), record, rounds=chosen.rounds, ranks=chosen.ranks, eagle3=chosen.eagle3,
                kv_dtype=chosen.kv_dtype, cpu=chosen.cpu,
            ).run()  # fmt: skip
        except RuntimeError as error:
            failure = str(error)[:4000]
        record.save(good=good(record.found) and failure is None, failure=failure)
    record.show()
    sys.exit(0 if good(record.found) and failure is None else 1)


if __name__ == "__main__":
    main()
