"""What EAGLE3 gains at a given acceptance: ``bash eval/bench/gpu_run.sh eval.bench.eagle3_gpu`` prints one JSON object.

Layers of MiniMax-M3's real shapes with random weights; the draft is one layer of the published kind.

``--part speed``: servers without drafts and with synthetic acceptance take turns. Output tokens a second are those of
decoding alone: the time of a long answer to a cached prompt less that of a one-token answer. Beside them stands the
acceptance length that was realized.

``--part verify``: a server with **real** verification answers twice, drafting at random (next to nothing is accepted)
and told most of its own continuation by a script (``tests/scripted_draft.py``: drafts are accepted and rolled back).
One prompt at a time all matrices have the same shapes both times, so what is accepted must not change a token. The
server without drafts has other shapes, and random weights in bf16 part within a few tokens when a product is summed in
another order; it therefore scores each answer: how far, in nats, each token's log-probability is below that of its own
choice at that place. A right verification is as close to it as its own answers are.

A six-layer model has a tenth of M3's decoder beside a whole LM head, and the draft a whole LM head of its own, so a
draft step weighs several times what it does beside 60 layers: the ratio is no forecast for M3's. ``--part deep`` is
``speed`` on 24 sparse layers with 16 experts each: there the draft weighs a quarter of that, while a verification reads
fewer experts than it would of 128 (four rows of four experts each, of 16).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from agentserve.runtime.speculation import SpeculationSettings, golden_length
from eval.bench.eagle3_server import SpecServer
from eval.bench.gpu_frame import Record, options, out_file, plugin_path, prompt, python_path, take_turns
from eval.bench.gpu_server import DEEP, FEW_EXPERTS, REAL, TINY
from eval.bench.index_reuse_summary import equality
from tests.scripted_draft import enable, key_of, write_script

DRAFTS = 3
ANSWER = 32  # tokens that are compared and scored
PARTS = {
    "speed": ("off", "synthetic", "off", "synthetic"),
    "deep": ("off", "synthetic", "off", "synthetic"),
    "verify": ("off", "real", "off"),
}
SHAPES = {"speed": REAL, "deep": DEEP, "verify": FEW_EXPERTS}


def acceptance(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps and acceptance length of a batch; empty without drafts."""
    metas = [a["meta_info"] for a in answers if a["meta_info"].get("spec_verify_ct")]
    steps = sum(m["spec_verify_ct"] for m in metas)
    if not steps:
        return {}
    return {"steps": steps, "length": 1 + sum(m["spec_num_correct_drafts"] for m in metas) / steps}


def shortfalls(meta: dict[str, Any], output: list[int], vocabulary: int) -> list[float]:
    """Of a prompt that ends with ``output`` and was scored: the best log-probability at each place less the token's.

    Raises ValueError where the scored tokens are not those.
    """
    scored = meta["input_token_logprobs"][-len(output) :]
    # SGLang shows the last token of the vocabulary as 0 (its logprob_result_processor), but scores it as it is.
    if [entry[1] for entry in scored] != [token if token < vocabulary - 1 else 0 for token in output]:
        raise ValueError("the server scored other tokens than the answer's")
    best = [entries[0][0] for entries in meta["input_top_logprobs"][-len(output) :]]
    return [top - entry[0] for top, entry in zip(best, scored, strict=True)]


def speeds(cells: dict[str, dict[str, list[dict[str, Any]]]], asked: float) -> dict[str, Any]:
    """By batch size: tokens/s with drafts over without, and acceptance realized over asked."""
    found = {}
    for count, on in cells.get("synthetic", {}).items():
        steps = sum(cell["steps"] for cell in on)
        length = 1 + sum(cell["steps"] * (cell["length"] - 1) for cell in on) / steps
        medians = [statistics.median(cell["tokens_per_s"] for cell in kind) for kind in (on, cells["off"][count])]
        found[f"batch {count}"] = {
            "output_tokens_per_s_ratio": round(medians[0] / medians[1], 3),
            "realized_length": round(length, 4),
            "realized_over_asked": round(length / asked, 4),
            "steps": steps,
        }
    return found


class Bench:
    """The plan of a part.

    Args:
        part: of ``PARTS``.
        record: where it goes, and how long everything may take.
        cpu: the tiny M3 on a CPU.
        graphs: whether decode runs in CUDA graphs.
        ranks: GPUs to share the models.
    """

    def __init__(self, part: str, record: Record, *, cpu: bool, graphs: bool, ranks: int) -> None:
        self._part, self._record = part, record
        self._cpu, self._graphs, self._ranks = cpu, graphs, ranks
        self._folder = Path(tempfile.mkdtemp(prefix="eagle3-"))
        self._shape = TINY if cpu else SHAPES[part]
        self._length, self._new = (600, 65) if cpu else (8_000, 1025)
        self._batches = (1, 2) if cpu else (1, 8)
        self._asked = golden_length(DRAFTS)
        self._cells: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._answers: dict[str, list[list[int]]] = {}
        self._first: list[int] = []
        record.found |= {
            "drafts": DRAFTS, "asked_length": self._asked, "prompt_tokens": self._length, "cuda_graphs": graphs,
            "ranks": ranks, "experts": self._shape.num_experts, "layers": self._shape.num_layers,
            "cells": self._cells, "counters": [],
        }  # fmt: skip

    def run(self) -> None:
        """Everything; raises what a server raises, with all found so far on disk."""
        use = self._verify if self._part == "verify" else self._measure
        take_turns(PARTS[self._part], self._start, use, self._record, ahead_s=70, save=self._save, failed=self._failed)

    def _failed(self, mode: str) -> None:
        """A server with drafts did not start: the rest goes on without CUDA graphs for drafting, and says so."""
        if mode != "off":
            self._graphs = self._record.found["cuda_graphs"] = False

    def _start(self, mode: str, place: int) -> SpecServer:
        folder = self._folder / str(place)
        path = plugin_path(folder / "path", "eagle3_bench", "eval.bench.eagle3_weights:register")
        environment = dict(enable(path, self._script)) if mode == "real" else {}
        environment["PYTHONPATH"] = python_path(path, environment.get("PYTHONPATH"))
        settings = {
            "off": None,
            "synthetic": SpeculationSettings(length=self._asked),
            "real": SpeculationSettings(),
        }[mode]
        # With overlap SGLang drafts before it has put down what the step before wrote, which the script goes by.
        return SpecServer(
            folder / "server", settings, drafts=DRAFTS, batches=self._batches, shape=self._shape, cpu=self._cpu,
            environment=environment, graphs=self._graphs or mode == "off", ranks=self._ranks, overlap=mode != "real",
        )  # fmt: skip

    @property
    def _script(self) -> Path:
        return self._folder / "script.json"

    def _prompts(self, count: int) -> list[list[int]]:
        return [prompt(self._length, seed, self._shape.vocab_size) for seed in range(count)]

    def _measure(self, mode: str, server: SpecServer, place: int) -> None:
        for count in self._batches:
            prompts = self._prompts(count)
            server.generate(prompts, 40)  # prefill, kernels
            once = min(server.generate(prompts, 1)[0] for _ in range(2))
            cell = self._cells.setdefault(mode, {}).setdefault(str(count), [])
            for _ in range(2):
                seconds, answers = server.generate(prompts, self._new)
                speed = count * (self._new - 1) / (seconds - once)
                cell.append({"tokens_per_s": round(speed, 2), **acceptance(answers)})
                self._record.note(f"{mode} x{count}: {cell[-1]}")
        if mode == "synthetic":
            self._record.found["counters"].append(server.counters())

    def _verify(self, mode: str, server: SpecServer, place: int) -> None:
        if mode == "real":
            self._draft(server)
        elif place == 0:
            self._first = self._first_tokens(server)
            self._answer("without drafts", server)
        else:
            self._score(server)

    def _first_tokens(self, server: SpecServer) -> list[int]:
        """Each prompt alone and cold: the same matrix shapes with and without drafts, so the same bits."""
        server.flush()
        return [server.generate([ids], 1)[1][0]["output_ids"][0] for ids in self._prompts(self._batches[-1])]

    def _answer(self, name: str, server: SpecServer, *, together: bool = False) -> dict[str, Any]:
        """Answer all prompts behind the cached prefix that ``_first_tokens`` left; returns what was accepted.

        One by one unless ``together``: how a batch is put together for its prefill depends on when requests arrive.
        """
        prompts = self._prompts(self._batches[-1])
        batches = [prompts] if together else [[ids] for ids in prompts]
        answers = [answer for batch in batches for answer in server.generate(batch, ANSWER)[1]]
        self._answers[name] = [answer["output_ids"] for answer in answers]
        return acceptance(answers)

    def _draft(self, server: SpecServer) -> None:
        first = self._first_tokens(server)
        at_random = self._answer("random drafts", server)
        own = self._answers["random drafts"]
        write_script(self._script, {key_of(p): ids for p, ids in zip(self._prompts(len(own)), own, strict=True)})
        scripted = self._answer("scripted drafts", server)
        in_a_batch = self._answer("scripted drafts in a batch", server, together=True)
        self._record.found["real_verification"] = {
            "first_tokens": len(first),
            "first_tokens_equal_at_equal_shapes": sum(a == b for a, b in zip(self._first, first, strict=True)),
            "random_drafts": at_random,
            "scripted_drafts": scripted,
            "scripted_drafts_in_a_batch": in_a_batch,
            "scripted_against_random": equality(own, self._answers["scripted drafts"]),
            "in_a_batch_against_random": equality(own, self._answers["scripted drafts in a batch"]),
            "random_against_none": equality(self._answers["without drafts"], own),
        }
        self._record.found["counters"].append(server.counters())
        self._record.note(f"real: {self._record.found['real_verification']}")

    def _score(self, server: SpecServer) -> None:
        scores = self._record.found["nats_below_the_choice_without_drafts"] = {}
        for name, outputs in self._answers.items():
            below: list[float] = []
            for ids, output in zip(self._prompts(len(outputs)), outputs, strict=True):
                _, (answer,) = server.generate(
                    [ids + output], 1, return_logprob=True, logprob_start_len=len(ids) - 1, top_logprobs_num=1
                )
                below += shortfalls(answer["meta_info"], output, self._shape.vocab_size)
            scores[name] = {"tokens": len(below), "mean": statistics.mean(below), "largest": max(below)}
        self._record.note(f"scored: {scores}")

    def _save(self) -> None:
        self._record.save(summary=speeds(self._cells, self._asked))


def main() -> None:
    parser = options(__doc__, budget_s=470)
    parser.add_argument("--part", choices=PARTS, default="speed", help="what to do")
    parser.add_argument("--no-graphs", action="store_true", help="without CUDA graphs")
    chosen = parser.parse_args()
    out = out_file(f"eagle3-{chosen.part}-{chosen.ranks}.json")
    record = Record("eval.bench.eagle3_gpu", out, budget_s=chosen.budget)
    try:
        Bench(chosen.part, record, cpu=chosen.cpu, graphs=not chosen.no_graphs, ranks=chosen.ranks).run()
    finally:
        record.show()


if __name__ == "__main__":
    main()
