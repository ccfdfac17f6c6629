"""What EAGLE3 gains at a given acceptance: ``bash eval/bench/gpu_run.sh eval.bench.eagle3_gpu`` prints one JSON object.

Servers without drafts and with synthetic acceptance take turns, on layers of MiniMax-M3's real shapes with random
weights (the draft is one layer of the published kind). Output tokens a second are those of decoding alone: the time of
a long answer to a cached prompt less that of a one-token answer. Beside them stand the acceptance length that was
realized, and answers under **real** verification, whose draft is told most of the continuation by a script
(``tests/scripted_draft.py``). A six-layer model of random weights in bf16 parts from itself within a few tokens when a
product is summed in another order, so equality of tokens says little here. The server without drafts therefore scores
each answer: how far, in nats, each token's log-probability is below that of its own choice at that place. A right
verification is as close to it as its own answers are.

A six-layer model has a tenth of M3's decoder beside a whole LM head, and the draft a whole LM head of its own, so a
draft step weighs several times what it does beside 60 layers: the gain is a lower bound for M3's.
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

from agentserve.runtime.speculation import SpeculationSettings, golden_length
from eval.bench.eagle3_server import SpecServer
from eval.bench.index_reuse_server import REAL, TINY
from tests.scripted_draft import enable, key_of, write_script

DRAFTS = 3


def prompt(length: int, seed: int, vocabulary: int) -> list[int]:
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(2, vocabulary) for _ in range(length)]


def acceptance(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps and acceptance length of a batch; empty without drafts."""
    metas = [a["meta_info"] for a in answers if a["meta_info"].get("spec_verify_ct")]
    steps = sum(m["spec_verify_ct"] for m in metas)
    if not steps:
        return {}
    return {"steps": steps, "length": 1 + sum(m["spec_num_correct_drafts"] for m in metas) / steps}


def shortfalls(meta: dict[str, Any], count: int) -> list[float]:
    """Of the last ``count`` tokens of a scored prompt: the best log-probability at its place less the token's own."""
    own = [entry[0] for entry in meta["input_token_logprobs"][-count:]]
    best = [entries[0][0] for entries in meta["input_top_logprobs"][-count:]]
    return [top - mine for top, mine in zip(best, own, strict=True)]


class Bench:
    """The plan within one time budget; what was found is written after every server."""

    def __init__(self, *, budget_s: float, out: Path, cpu: bool, graphs: bool, ranks: int) -> None:
        self._ranks = ranks
        self._end = time.monotonic() + budget_s
        self._out, self._cpu, self._graphs = out, cpu, graphs
        self._folder = Path(tempfile.mkdtemp(prefix="eagle3-"))
        self._length, self._new = (600, 65) if cpu else (8_000, 1025)
        self._batches = (1, 2) if cpu else (1, 8)
        self._vocabulary = (TINY if cpu else REAL).vocab_size
        self._asked = golden_length(DRAFTS)
        self._reference: list[list[int]] = []
        self._drafted: list[list[int]] = []
        self._first: list[int] = []
        self.result: dict[str, Any] = {
            "drafts": DRAFTS, "asked_length": self._asked, "prompt_tokens": self._length, "cuda_graphs": graphs,
            "ranks": ranks, "cells": {}, "counters": [], "log": [], "left_out": [],
        }  # fmt: skip

    def run(self) -> None:
        plan = ["off", "synthetic", "real", "off"]
        following: SpecServer | None = self._start(plan[0], 0)
        try:
            for place, mode in enumerate(plan):
                if following is None:
                    self.result["left_out"].append(mode)
                    continue
                server, following = following, None
                try:
                    server.open_gate()
                    try:
                        server.wait_ready(min(300.0, max(self._left(), 1)))
                    except RuntimeError as error:
                        if mode == "off" or not self._graphs:
                            raise
                        # The rest goes on without CUDA graphs for drafting, and says so.
                        self._note(f"{mode} with CUDA graphs: {error}")
                        self._graphs = self.result["cuda_graphs"] = False
                        following = self._start(plan[place + 1], place + 1)
                        continue
                    self._note(f"{mode} ready")
                    if place + 1 < len(plan) and self._left() > 70:
                        following = self._start(plan[place + 1], place + 1)  # imports meanwhile, waits at its gate
                    if mode == "real":
                        self._compare(server)
                    else:
                        self._measure(mode, server, first=place == 0)
                    if self._drafted and mode == "off":
                        self._score(server)
                finally:
                    server.stop()
                    self._save()
        finally:
            if following is not None:
                following.stop()

    def _start(self, mode: str, place: int) -> SpecServer:
        folder = self._folder / str(place)
        plugins = "[sglang.srt.plugins]\neagle3_bench = eval.bench.eagle3_weights:register\n"
        info = folder / "path" / "eagle3_bench-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eagle3-bench\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(plugins)
        environment = dict(enable(folder / "path", self._script)) if mode == "real" else {}
        known = environment.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "path"), known]))
        settings = {
            "off": None,
            "synthetic": SpeculationSettings(length=self._asked),
            "real": SpeculationSettings(),
        }[mode]
        return SpecServer(
            folder / "server", settings, drafts=DRAFTS, batches=self._batches, cpu=self._cpu, environment=environment,
            graphs=self._graphs or mode == "off", ranks=self._ranks,
        )  # fmt: skip

    @property
    def _script(self) -> Path:
        return self._folder / "script.json"

    def _prompts(self, count: int) -> list[list[int]]:
        return [prompt(self._length, seed, self._vocabulary) for seed in range(count)]

    def _measure(self, mode: str, server: SpecServer, *, first: bool) -> None:
        for count in self._batches:
            prompts = self._prompts(count)
            server.generate(prompts, 40)  # prefill, kernels
            once = min(server.generate(prompts, 1)[0] for _ in range(2))
            cell = self.result["cells"].setdefault(mode, {}).setdefault(str(count), [])
            for _ in range(2):
                seconds, answers = server.generate(prompts, self._new)
                speed = count * (self._new - 1) / (seconds - once)
                cell.append({"tokens_per_s": round(speed, 2), **acceptance(answers)})
                self._note(f"{mode} x{count}: {cell[-1]}")
        if mode == "synthetic":
            self.result["counters"].append(server.counters())
        elif first:
            self._first = self._first_tokens(server)
            _, answers = server.generate(self._prompts(self._batches[-1]), 36)
            self._reference = [a["output_ids"] for a in answers]
            write_script(
                self._script,
                {key_of(p): ids for p, ids in zip(self._prompts(self._batches[-1]), self._reference, strict=True)},
            )

    def _first_tokens(self, server: SpecServer) -> list[int]:
        """Each prompt alone and cold: the same matrix shapes with and without drafts, so the same bits."""
        server.flush()
        return [server.generate([ids], 1)[1][0]["output_ids"][0] for ids in self._prompts(self._batches[-1])]

    def _compare(self, server: SpecServer) -> None:
        prompts = self._prompts(self._batches[-1])
        first = self._first_tokens(server)
        _, answers = server.generate(prompts, 32)
        self._drafted = [a["output_ids"] for a in answers]
        same = [
            next((i for i, (a, b) in enumerate(zip(known, made["output_ids"], strict=False)) if a != b), 32)
            for known, made in zip(self._reference, answers, strict=True)
        ]
        self.result["real_verification"] = {
            "first_tokens_equal_at_equal_shapes": sum(a == b for a, b in zip(self._first, first, strict=True)),
            "answers": len(same), "equal": sum(n == 32 for n in same), "equal_prefixes": same,
            "distinct_tokens": len({token for known in self._reference for token in known}), **acceptance(answers),
        }  # fmt: skip
        self._note(f"real: {self.result['real_verification']}")

    def _score(self, server: SpecServer) -> None:
        prompts = self._prompts(self._batches[-1])
        for name, outputs in (("drafted", self._drafted), ("own", [ids[:32] for ids in self._reference])):
            below: list[float] = []
            for ids, output in zip(prompts, outputs, strict=True):
                _, (answer,) = server.generate(
                    [ids + output], 1, return_logprob=True, logprob_start_len=len(ids) - 1, top_logprobs_num=1
                )
                below += shortfalls(answer["meta_info"], len(output))
            self.result.setdefault("nats_below_the_choice_without_drafts", {})[name] = {
                "tokens": len(below), "mean": statistics.mean(below), "largest": max(below),
            }  # fmt: skip
        self._note(f"scored: {self.result['nats_below_the_choice_without_drafts']}")

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _note(self, text: str) -> None:
        self.result["log"].append(f"{self._left():.0f} s left: {text}")
        print(self.result["log"][-1], flush=True)

    def _save(self) -> None:
        cells = self.result["cells"]
        summary = {}
        for count in cells.get("synthetic", {}):
            on, off = cells["synthetic"][count], cells["off"][count]
            steps = sum(found["steps"] for found in on)
            length = 1 + sum(found["steps"] * (found["length"] - 1) for found in on) / steps
            speeds = [statistics.median(f["tokens_per_s"] for f in found) for found in (on, off)]
            summary[f"batch {count}"] = {
                "output_tokens_per_s_ratio": round(speeds[0] / speeds[1], 3),
                "realized_length": round(length, 4),
                "realized_over_asked": round(length / self._asked, 4),
                "steps": steps,
            }
        self._out.write_text(json.dumps({**self.result, "summary": summary}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=470, help="seconds for everything")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs to share the models")
    parser.add_argument("--cpu", action="store_true", help="the tiny M3 on a CPU, to try the benchmark itself")
    arguments = parser.parse_args()
    out = Path(os.environ.get("OUT", ".")) / f"eagle3-{arguments.ranks}.json"
    bench = Bench(
        budget_s=arguments.budget, out=out, cpu=arguments.cpu, graphs=not arguments.no_graphs, ranks=arguments.ranks
    )
    try:
        bench.run()
    finally:
        if out.exists():
            print(out.read_text())


if __name__ == "__main__":
    main()
