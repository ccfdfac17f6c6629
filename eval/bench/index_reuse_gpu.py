"""What index reuse is worth on a GPU: ``eval/bench/gpu_run.sh eval.bench.index_reuse_gpu`` prints one JSON object.

Servers of three modes take turns (off, selection shared, selection shared and producers skipped; forth and back), on
layers of MiniMax-M3's real shapes with random weights. Timed at several context lengths and batch sizes: prefill of a
cold prompt, and time per output token as the difference between a long and a one-token answer to a cached prompt, so
that what both pay drops out. Beside the times stand the executed counters of the same servers and, from two more
servers whose matrix products are the same ones, the equality of greedy tokens and log-probabilities.

The extrapolation to the whole model assumes that its 57 sparse layers cost what these five do.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from eval.bench.index_reuse_server import REAL, TINY, BenchServer, Mode

SPARSE_LAYERS_OF_M3 = 57
LAYERS_OF_M3 = 60
MODES = ("off", "shared", "skipped")
# Forth and back, so that a drift of the machine meets every mode alike; the two unfused ones are compared, not timed.
PLAN = (
    Mode("off"), Mode("shared"), Mode("skipped"), Mode("shared", fused=False), Mode("skipped", fused=False),
    Mode("shared"), Mode("off"),
)  # fmt: skip
# The largest cell takes most of a minute, nearly all of it prefill: only while enough is left for what follows.
RESERVE_S = {"off": 330, "shared": 250, "skipped": 170}


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random tokens; the same for the same length and seed."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, vocabulary) for _ in range(length)]


def measure_cell(server: BenchServer, prompts: list[list[int]], new_tokens: int, repeats: int) -> dict[str, Any]:
    """Times of one batch of prompts, in seconds, and its greedy tokens. What is cached before stays cached."""
    prefill, first = server.generate(prompts, 1)
    once, long, answers = [], [], first
    for _ in range(repeats):
        once.append(server.generate(prompts, 1)[0])
        seconds, answers = server.generate(prompts, new_tokens)
        long.append(seconds)
    return {
        "prefill_s": prefill,
        "per_token_s": (min(long) - min(once)) / (new_tokens - 1),
        "cached_at_prefill": sum(a["meta_info"]["cached_tokens"] for a in first),
        "cached_at_decode": sum(a["meta_info"]["cached_tokens"] for a in answers),
        "tokens": [a["output_ids"] for a in answers],
    }


def check(server: BenchServer, prompts: list[list[int]], new_tokens: int, tail: int) -> dict[str, Any]:
    """Greedy tokens alone, in a batch and behind a cached prefix, and log-probabilities of each prompt's tail."""
    server.flush()
    _, batch = server.generate(prompts, new_tokens)
    cached = [server.generate([ids], new_tokens)[1][0] for ids in prompts]
    server.flush()
    cold = [server.generate([ids], new_tokens)[1][0] for ids in prompts]
    server.flush()
    start = len(prompts[0]) - tail
    _, scored = server.generate([prompts[0]], 1, return_logprob=True, logprob_start_len=start)
    return {
        "tokens": {
            name: [a["output_ids"] for a in answers]
            for name, answers in (("batch", batch), ("cached", cached), ("cold", cold))
        },
        "hits": sum(a["meta_info"]["cached_tokens"] for a in cached),
        "logprobs": [entry[0] for entry in scored[0]["meta_info"]["input_token_logprobs"] if entry[0] is not None],
    }


def equality(reference: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """How many answers are the same, and after how many tokens the first one that is not parts."""
    prefixes = [
        next((i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), len(left))
        for left, right in zip(reference, other, strict=True)
    ]
    return {
        "answers": len(prefixes),
        "equal": sum(n == len(left) for n, left in zip(prefixes, reference, strict=True)),
        "shortest_equal_prefix": min(prefixes),
        "distinct_tokens": len({token for answer in reference for token in answer}),
    }


class Bench:
    """The plan, in one time budget; what was found is written after every step.

    Args:
        budget_s: seconds for everything. What does not fit is left out and listed.
        out: the JSON file.
    """

    def __init__(self, *, budget_s: float, out: Path, cpu: bool, freq: int) -> None:
        self._end = time.monotonic() + budget_s
        self._out, self._cpu, self._freq = out, cpu, freq
        self._folder = Path(tempfile.mkdtemp(prefix="index-reuse-"))
        self._vocabulary = (TINY if cpu else REAL).vocab_size
        self._lengths = (600, 1200, 2400) if cpu else (8_000, 32_000, 120_000)
        self._new_tokens, self._repeats = (9, 1) if cpu else (129, 2)
        self._started = 0
        self._checks: dict[str, Any] = {}
        self._known: dict[tuple[int, int], list[int]] = {}
        self.result: dict[str, Any] = {"freq": freq, "cells": {}, "executed": {}, "log": [], "left_out": []}

    def run(self) -> None:
        """Everything; raises what a server raises, with all found so far on disk."""
        following: BenchServer | None = self._start(PLAN[0])
        try:
            for place, mode in enumerate(PLAN):
                if following is None:
                    self.result["left_out"].append(str(mode))
                    continue
                server, following = following, None
                try:
                    server.open_gate()
                    server.wait_ready(self._left())
                    self._note(f"{mode} ready")
                    if place + 1 < len(PLAN) and self._left() > 40:
                        following = self._start(PLAN[place + 1])  # imports meanwhile, and waits at its gate
                    self._use(server)
                finally:
                    server.stop()
                    self._save()
        finally:
            if following is not None:
                following.stop()

    def _use(self, server: BenchServer) -> None:
        mode = server.mode
        if not mode.fused:
            self._checks[mode.name] = check(server, self._prompts(self._lengths[0], 8), 32, 512)
            return
        for _ in range(2 if mode.name == "skipped" else 1):
            self._cells(server)
        if mode.name != "off" and mode.name not in self.result["executed"]:
            self.result["executed"][mode.name] = server.executed()

    def _start(self, mode: Mode) -> BenchServer:
        self._started += 1
        return BenchServer(self._folder / str(self._started), mode, freq=self._freq, cpu=self._cpu)

    def _prompts(self, length: int, count: int) -> list[list[int]]:
        for seed in range(count):
            if (length, seed) not in self._known:
                self._known[length, seed] = prompt(length, seed, self._vocabulary)
        return [self._known[length, seed] for seed in range(count)]

    def _cells(self, server: BenchServer) -> None:
        mode = server.mode.name
        first = not self.result["cells"].get(mode)
        if first:  # compile every kernel outside of what is timed
            for count in (1, 8):
                server.generate(self._prompts(self._lengths[0] + 500, count), 8)
        long = self._lengths[-1]
        cells = [(length, count) for count in (8, 1) for length in self._lengths if (length, count) != (long, 8)]
        if first:
            cells.append((long, 8))  # behind its first prompt alone, which stays cached
        for length, count in cells:
            if self._left() < (RESERVE_S[mode] if (length, count) == (long, 8) else 15):
                self.result["left_out"].append(f"{mode} {length}x{count}")
                continue
            if (length, count) != (long, 8):
                server.flush()
            found = measure_cell(server, self._prompts(length, count), self._new_tokens, self._repeats)
            self.result["cells"].setdefault(mode, {}).setdefault(f"{length}x{count}", []).append(found)
            self._note(f"{mode} {length}x{count}: {found['prefill_s']:.3f} s, {found['per_token_s'] * 1e3:.3f} ms")

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _note(self, text: str) -> None:
        self.result["log"].append(f"{self._left():.0f} s left: {text}")
        print(self.result["log"][-1], flush=True)

    def _save(self) -> None:
        cells = summary(self.result["cells"], self._freq)
        report = {**self.result, "cells": cells, "equality": compare(self._checks)}
        self._out.write_text(json.dumps(report, indent=1))


def compare(checks: dict[str, Any]) -> dict[str, Any]:
    """Shared against shared and skipped; empty until both were checked."""
    if not {"shared", "skipped"} <= checks.keys():
        return {}
    reference, other = checks["shared"], checks["skipped"]
    return {
        **{way: equality(reference["tokens"][way], other["tokens"][way]) for way in reference["tokens"]},
        "cached_tokens": [reference["hits"], other["hits"]],
        "positions_compared": len(reference["logprobs"]),
        "largest_logprob_difference": max(
            abs(a - b) for a, b in zip(reference["logprobs"], other["logprobs"], strict=True)
        ),
    }


def summary(cells: dict[str, dict[str, list[dict[str, Any]]]], freq: int) -> dict[str, Any]:
    """Median times in ms by mode, and what sharing and skipping save by layer and, extrapolated, in all of M3."""
    reusers = 5 - len(range(0, 5, freq))
    reusers_of_m3 = SPARSE_LAYERS_OF_M3 - len(range(0, SPARSE_LAYERS_OF_M3, freq))
    rows: dict[str, Any] = {}
    for cell in cells.get("off", {}):
        row: dict[str, Any] = {}
        for what in ("prefill_s", "per_token_s"):
            times = {
                mode: [found[what] * 1e3 for found in cells[mode][cell]]
                for mode in MODES
                if cell in cells.get(mode, {})
            }
            row[what.replace("_s", "_ms")] = {mode: [round(t, 4) for t in found] for mode, found in times.items()}
            medians = {mode: statistics.median(found) for mode, found in times.items()}
            for mode in MODES[1:]:
                if mode not in medians:
                    continue
                saved = medians["off"] - medians[mode]
                row[f"{what.removesuffix('_s')}_{mode}"] = {
                    "ratio_to_off": round(medians[mode] / medians["off"], 4),
                    "saved_us_a_reusing_layer": round(saved / reusers * 1e3, 2),
                    "saved_ms_extrapolated_to_57_sparse_layers": round(saved / reusers * reusers_of_m3, 3),
                    # Six layers and a head taken for six layers: 60 cost less than ten times as much, so at least this.
                    "saved_share_extrapolated_at_least": round(
                        saved / reusers * reusers_of_m3 / (medians["off"] * LAYERS_OF_M3 / 6), 4
                    ),
                }
        row["cached_at_prefill"] = sum(f["cached_at_prefill"] for mode in cells for f in cells[mode].get(cell, []))
        row["equal_tokens_shared_skipped"] = (
            equality(cells["shared"][cell][0]["tokens"], cells["skipped"][cell][0]["tokens"])
            if cell in cells.get("shared", {}) and cell in cells.get("skipped", {})
            else None
        )
        rows[cell] = row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=515, help="seconds for everything")
    parser.add_argument("--freq", type=int, default=4, help="group size")
    parser.add_argument("--cpu", action="store_true", help="the tiny M3 on a CPU, to try the benchmark itself")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ".")) / "index-reuse-h200.json"
    bench = Bench(budget_s=arguments.budget, out=out, cpu=arguments.cpu, freq=arguments.freq)
    try:
        bench.run()
    finally:
        if out.exists():
            print(out.read_text())


if __name__ == "__main__":
    main()
