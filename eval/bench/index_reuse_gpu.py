"""What index reuse is worth on a GPU: ``bash eval/bench/gpu_run.sh eval.bench.index_reuse_gpu`` prints a JSON object.

Servers of three modes take turns (off, selection shared, selection shared and producers skipped; forth and back), on
layers of MiniMax-M3's real shapes with random weights. Timed are the prefill of a cold prompt, and the time per output
token of a cached one while the whole batch decodes. Beside the times stand the executed counters of the same servers.
``--part equality`` compares greedy tokens and log-probabilities of servers whose matrix products are the same ones, so
that skipping the producers, or storing in one kernel, changes no bit where the machine repeats its own; SGLang's Triton
kernels take their first configuration in it, in ``--part equality-timed`` the one that is fastest. ``--part deep``
times decoding alone on a model of 24 sparse layers with fewer experts, which tells what a layer saves several times
more sharply. ``--part long`` is the batch of eight longest prompts, which mostly takes time to prefill.

The extrapolation to the whole model assumes that its 57 sparse layers cost what these five do.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.bench.gpu_frame import Record, options, out_file, prompt, take_turns
from eval.bench.gpu_server import DEEP, FEW_EXPERTS, REAL, TINY
from eval.bench.index_reuse_server import BenchServer, Mode
from eval.bench.index_reuse_summary import compare, summary

# Forth and back (the middle server has two turns), so that a drift of the machine meets every mode alike.
TIMED = (Mode("off"), Mode("shared"), Mode("skipped"), Mode("shared"), Mode("off"))
COMPARED = (
    Mode("shared", fused=False), Mode("skipped", fused=False), Mode("skipped", fused=False, separate_store=True),
    Mode("shared", fused=False),
)  # fmt: skip
# As in serving: what they chose is recorded, so that a difference can be laid to it.
COMPARED_TIMED = tuple(replace(mode, timed=True) for mode in COMPARED)
DEEP_TIMED = (Mode("shared"), Mode("skipped"), Mode("off"), Mode("skipped"), Mode("shared"))
LONG_TIMED = (Mode("off"), Mode("shared"), Mode("skipped"))
PARTS = {
    "time": TIMED, "equality": COMPARED, "equality-timed": COMPARED_TIMED, "all": (*TIMED, *COMPARED),
    "deep": DEEP_TIMED, "long": LONG_TIMED,
}  # fmt: skip
SHAPES = {"deep": DEEP, "equality": FEW_EXPERTS, "equality-timed": FEW_EXPERTS}
START_S = 17.0  # of a server that has imported everything and waits at its gate
BATCHES = (1, 8)


def check(server: BenchServer, prompts: list[list[int]], new_tokens: int, tail: int) -> dict[str, Any]:
    """Greedy tokens alone, in a batch and behind a cached prefix, and log-probabilities of each prompt's tail."""
    server.flush()
    _, batch = server.generate(prompts, new_tokens)
    cached = [server.generate([ids], new_tokens)[1][0] for ids in prompts]
    found: dict[str, Any] = {"hits": sum(a["meta_info"]["cached_tokens"] for a in cached)}
    answers = {"batch": batch, "cached": cached}
    for again in ("", " again"):
        server.flush()
        answers[f"cold{again}"] = [server.generate([ids], new_tokens)[1][0] for ids in prompts]
        server.flush()
        start = len(prompts[0]) - tail
        _, (scored,) = server.generate([prompts[0]], 1, return_logprob=True, logprob_start_len=start)
        entries = scored["meta_info"]["input_token_logprobs"]
        found[f"logprobs{again}"] = [entry[0] for entry in entries if entry[0] is not None]
    return {**found, "tokens": {name: [a["output_ids"] for a in given] for name, given in answers.items()}}


class Bench:
    """The plan of a part.

    Args:
        part: of ``PARTS``.
        record: where it goes, and how long everything may take.
        cpu: the tiny M3 on a CPU.
        freq: group size of the sharing modes.
        ranks: GPUs to share the model.
        experts: of a layer; None: what the part takes.
    """

    def __init__(self, part: str, record: Record, *, cpu: bool, freq: int, ranks: int, experts: int | None) -> None:
        self._plan, self._part, self._record = PARTS[part], part, record
        self._cpu, self._freq, self._ranks = cpu, freq, ranks
        self._folder = Path(tempfile.mkdtemp(prefix="index-reuse-"))
        self._shape = TINY if cpu else SHAPES.get(part, REAL)
        if experts is not None:
            self._shape = replace(self._shape, num_experts=experts)
        self._lengths = (600, 900, 1400) if cpu else (8_000, 32_000, 120_000)
        self._new_tokens, self._paces = (33, 2) if cpu else (257, 3)
        self._turns_left = sum(self._turns(mode) for mode in self._plan)
        self._checks: dict[str, Any] = {}
        self._cells: dict[str, dict[str, dict[str, Any]]] = {}
        self._known: dict[tuple[int, int], list[int]] = {}
        self._executed: dict[str, Any] = {}
        record.found |= {
            "freq": freq, "ranks": ranks, "sparse_layers": self._shape.num_layers - self._shape.num_dense_layers,
            "experts": self._shape.num_experts, "executed": self._executed,
        }  # fmt: skip

    def run(self) -> None:
        """Everything; raises what a server raises, with all found so far on disk."""
        take_turns(self._plan, self._start, self._use, self._record, ahead_s=45, save=self._save)

    def _turns(self, mode: Mode) -> int:
        return 0 if not mode.fused else 2 if mode.name == "skipped" else 1

    def _use(self, mode: Mode, server: BenchServer, place: int) -> None:
        if not mode.fused:
            name = str(mode) if str(mode) not in self._checks else f"{mode}, once more"
            found = check(server, self._prompts(self._lengths[0], 8), 32, 512)
            self._checks[name] = {**found, "configurations": server.configurations()}
            self._note_executed(server)
            return
        if self._part in ("deep", "long"):
            (self._pace_only if self._part == "deep" else self._long_batch)(server)
            self._note_executed(server)
            return
        small = self._lengths[0]
        for count in BATCHES:  # every server loads, and the first compiles, its kernels outside of what is timed
            server.generate(self._prompts(small + 500, count), 8)
        for length, count in ((small, 1), (small, 8), (self._lengths[1], 1)):
            server.flush()
            server.generate(self._prompts(length, count), 8)
        for _ in range(self._turns(mode)):
            starts_left = len(self._plan) - place - 1
            slice_s = (self._record.left() - START_S * starts_left - 6) / self._turns_left
            self._turn(server, time.monotonic() + slice_s)
            self._turns_left -= 1
        self._note_executed(server)

    def _pace_only(self, server: BenchServer) -> None:
        small, _, long = self._lengths
        for length, count in ((long, 1), (small, 8)):
            server.generate(self._prompts(length, count), 8)  # prefill, kernels
            cell = self._cell(server, length, count)
            for _ in range(4):
                cell["per_token_s"].append(server.pace(self._prompts(length, count), self._new_tokens)[0])
            self._record.note(f"{server.mode} {length}x{count}: {[round(s * 1e3, 4) for s in cell['per_token_s']]} ms")

    def _long_batch(self, server: BenchServer) -> None:
        small, _, long = self._lengths
        for length, count in ((long, 1), (small, 8)):
            server.generate(self._prompts(length, count), 8)  # kernels
        self._prefill(server, long, 8)
        cell = self._cell(server, long, 8)
        for _ in range(4):
            cell["per_token_s"].append(server.pace(self._prompts(long, 8), self._new_tokens)[0])
        times = cell["prefill_s"][-1], [round(s * 1e3, 4) for s in cell["per_token_s"]]
        self._record.note(f"{server.mode} {long}x8: {times[0]:.3f} s, {times[1]} ms")

    def _note_executed(self, server: BenchServer) -> None:
        """What a mode's first server counted."""
        if server.mode.name != "off" and str(server.mode) not in self._executed:
            self._executed[str(server.mode)] = server.executed()

    def _turn(self, server: BenchServer, until: float) -> None:
        small, middle, long = self._lengths
        cells = [(small, 1), (middle, 1), (long, 1), (small, 8)]
        first = not self._cells.get(server.mode.name)
        # Batches of long prompts take most of their time to prefill: the middle length once a mode, the long one in a
        # part of its own.
        begin = 0.0
        for length, count in [(middle, 8), *cells] if first else cells:
            if (length, count) == cells[0]:
                begin = time.monotonic()
            self._prefill(server, length, count)
            for _ in range(self._paces + 2 * ((length, count) == (middle, 8))):
                seconds, _ = server.pace(self._prompts(length, count), self._new_tokens)
                self._cell(server, length, count)["per_token_s"].append(seconds)
            found = self._cell(server, length, count)
            times = found["prefill_s"][-1], found["per_token_s"][-1] * 1e3
            self._record.note(f"{server.mode} {length}x{count}: {times[0]:.3f} s, {times[1]:.3f} ms")
        more = (time.monotonic() - begin) / 2  # less than half of it was prefill
        for _ in range(3):
            if time.monotonic() + more > until:
                break
            for length, count in cells:
                self._prefill(server, length, count)

    def _prefill(self, server: BenchServer, length: int, count: int) -> None:
        server.flush()
        seconds, answers = server.generate(self._prompts(length, count), 1)
        cell = self._cell(server, length, count)
        cell["prefill_s"].append(seconds)
        cell["cached_at_prefill"] += sum(answer["meta_info"]["cached_tokens"] for answer in answers)

    def _cell(self, server: BenchServer, length: int, count: int) -> dict[str, Any]:
        empty = {"prefill_s": [], "per_token_s": [], "cached_at_prefill": 0}
        return self._cells.setdefault(server.mode.name, {}).setdefault(f"{length}x{count}", empty)

    def _start(self, mode: Mode, place: int) -> BenchServer:
        return BenchServer(
            self._folder / str(place),
            mode,
            freq=self._freq,
            cpu=self._cpu,
            shape=self._shape,
            ranks=self._ranks,
        )

    def _prompts(self, length: int, count: int) -> list[list[int]]:
        for seed in range(count):
            if (length, seed) not in self._known:
                self._known[length, seed] = prompt(length, seed, self._shape.vocab_size)
        return [self._known[length, seed] for seed in range(count)]

    def _save(self) -> None:
        layers, sparse = self._shape.num_layers, self._shape.num_layers - self._shape.num_dense_layers
        self._record.save(
            cells=summary(self._cells, layers=layers, sparse=sparse, freq=self._freq),
            seconds=self._cells,
            equality=compare(self._checks),
        )


def main() -> None:
    parser = options(__doc__, budget_s=500)
    parser.add_argument("--part", choices=PARTS, default="all", help="what to do")
    parser.add_argument("--freq", type=int, default=4, help="group size")
    parser.add_argument("--experts", type=int, help="of a layer")
    chosen = parser.parse_args()
    ranks = f"-tp{chosen.ranks}" if chosen.ranks > 1 else ""
    experts = "" if chosen.experts is None else f"-{chosen.experts}"
    out = out_file(f"index-reuse-{chosen.part}{ranks}{experts}.json")
    record = Record("eval.bench.index_reuse_gpu", out, budget_s=chosen.budget)
    try:
        Bench(chosen.part, record, cpu=chosen.cpu, freq=chosen.freq, ranks=chosen.ranks, experts=chosen.experts).run()
    finally:
        record.show()


if __name__ == "__main__":
    main()
