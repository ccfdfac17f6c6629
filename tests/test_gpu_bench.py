"""What the benchmarks on a GPU share, and what they conclude: without servers and without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.bench.eagle3_gpu import acceptance, shortfalls, speeds
from eval.bench.gpu_frame import Record, plugin_path, prompt, take_turns


class Turn:
    """A server that writes down what is asked of it."""

    def __init__(self, log: list[str], name: str, *, ready: bool = True) -> None:
        self._log, self.name, self._ready = log, name, ready
        log.append(f"start {name}")

    def open_gate(self) -> None:
        self._log.append(f"open {self.name}")

    def wait_ready(self, timeout_s: float) -> None:
        assert 1 <= timeout_s <= 300
        if not self._ready:
            raise RuntimeError("out of memory")

    def stop(self) -> None:
        self._log.append(f"stop {self.name}")


def turns(record: Record, *, broken: tuple[int, ...] = (), ahead_s: float = 10.0) -> list[str]:
    log: list[str] = []

    def use(mode: str, server: Turn, place: int) -> None:
        assert server.name == f"{mode}{place}"
        log.append(f"use {server.name}")

    take_turns(
        ["a", "b", "c"],
        lambda mode, place: Turn(log, f"{mode}{place}", ready=place not in broken),
        use,
        record,
        ahead_s=ahead_s,
        save=lambda: log.append("save"),
        failed=lambda mode: log.append(f"failed {mode}"),
    )
    return log


def test_a_server_imports_while_the_one_before_it_is_measured(tmp_path: Path) -> None:
    assert turns(Record("m", tmp_path / "r.json", 100.0)) == [
        "start a0", "open a0", "start b1", "use a0", "stop a0", "save",
        "open b1", "start c2", "use b1", "stop b1", "save",
        "open c2", "use c2", "stop c2", "save",
    ]  # fmt: skip


def test_the_rest_goes_on_when_a_later_server_does_not_start(tmp_path: Path) -> None:
    record = Record("m", tmp_path / "r.json", 100.0)
    log = turns(record, broken=(1,))
    assert log[6:] == ["open b1", "failed b", "start c2", "stop b1", "save", "open c2", "use c2", "stop c2", "save"]
    assert record.found["left_out"] == ["b"]
    assert "out of memory" in record.found["log"][1]
    log = turns(record, broken=(2,))
    assert log[-4:] == ["open c2", "failed c", "stop c2", "save"]


def test_without_its_first_server_a_benchmark_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        turns(Record("m", tmp_path / "r.json", 100.0), broken=(0,))


def test_what_does_not_fit_into_the_budget_is_left_out(tmp_path: Path) -> None:
    record = Record("m", tmp_path / "r.json", 5.0, ranks=2)
    assert turns(record) == ["start a0", "open a0", "use a0", "stop a0", "save"]
    assert record.found["left_out"] == ["b", "c"]
    record.save(summary=1)
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["ranks"], found["summary"], found["left_out"]) == (2, 1, ["b", "c"])
    assert found["command"].startswith("bash eval/bench/gpu_run.sh m")


def test_prompts_are_the_same_each_time() -> None:
    assert prompt(50, 1, 1000) == prompt(50, 1, 1000) != prompt(50, 2, 1000)
    assert min(prompt(500, 0, 10)) == 2  # not the tokens that begin and end a text
    assert max(prompt(500, 0, 10)) == 9


def test_a_plugin_is_found_on_the_path(tmp_path: Path) -> None:
    """As a process of SGLang looks for it."""
    path = plugin_path(tmp_path / "path", "bench_weights", "eval.bench.index_reuse_weights:register")
    code = (
        "from importlib.metadata import entry_points\n"
        "print({e.name: e.value for e in entry_points(group='sglang.srt.plugins')}['bench_weights'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "eval.bench.index_reuse_weights:register"


# --- EAGLE3


def test_acceptance_is_over_all_steps_of_a_batch() -> None:
    answers: list[dict[str, Any]] = [
        {"meta_info": {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}},
        {"meta_info": {"spec_verify_ct": 30, "spec_num_correct_drafts": 20}},
    ]
    assert acceptance(answers) == {"steps": 40, "length": 2.0}
    assert acceptance([{"meta_info": {}}]) == {}


def test_shortfalls_are_those_of_the_answers_tokens() -> None:
    meta = {
        "input_token_logprobs": [[None, 9, None], [-1.0, 5, None], [-2.5, 6, None]],
        "input_top_logprobs": [None, [[-1.0, 5, None]], [[-0.5, 7, None]]],
    }
    assert shortfalls(meta, [5, 6], 100) == [0.0, 2.0]
    with pytest.raises(ValueError, match="other tokens"):
        shortfalls(meta, [6, 5], 100)
    meta["input_token_logprobs"][1] = [-1.0, 0, None]  # how SGLang shows token 99 of 100
    assert shortfalls(meta, [99, 6], 100) == [0.0, 2.0]


def test_speeds_compare_medians_and_weigh_acceptance_by_steps() -> None:
    cells: dict[str, dict[str, list[dict[str, Any]]]] = {
        "off": {"1": [{"tokens_per_s": 100.0}, {"tokens_per_s": 110.0}, {"tokens_per_s": 120.0}]},
        "synthetic": {"1": [
            {"tokens_per_s": 121.0, "steps": 100, "length": 3.0}, {"tokens_per_s": 121.0, "steps": 300, "length": 2.6},
        ]},
    }  # fmt: skip
    assert speeds(cells, 2.7) == {
        "batch 1": {
            "output_tokens_per_s_ratio": 1.1,
            "realized_length": 2.7,
            "realized_over_asked": 1.0,
            "steps": 400,
        }
    }
    assert speeds({"off": cells["off"]}, 2.7) == {}
