"""The arithmetic of the GPU benchmark of index reuse."""

from __future__ import annotations

import pytest

from eval.bench.gpu_server import chosen_configurations
from eval.bench.index_reuse_server import pace_of
from eval.bench.index_reuse_summary import chosen_otherwise, compare, equality, saving, summary


def test_pace_counts_only_while_the_whole_batch_decodes() -> None:
    early = [(0.0, 1), (1.0, 11), (2.0, 41)]  # faster while it was alone, and done at 2.0
    late = [(1.0, 1), (1.5, 6), (2.0, 11), (2.2, 31)]  # faster again once it is alone
    assert pace_of({0: early, 1: late}) == pytest.approx(0.1)
    assert pace_of({0: late}) == pytest.approx(1.2 / 30)
    with pytest.raises(ValueError, match="hardly overlap"):
        pace_of({0: [(0.0, 1), (1.0, 9)], 1: [(1.0, 1), (2.0, 9)]})


def test_saving_by_layer_and_extrapolated() -> None:
    found = saving([4.0, 4.0, 4.2], [3.7, 3.7, 3.7], layers=6, reusers=3, freq=4)
    assert found["ratio_to_off"] == 0.925
    assert found["saved_us_a_reusing_layer"] == pytest.approx(100)
    # 42 of 57 layers reuse: 4.2 ms of less than ten times 4 ms
    assert found["extrapolated_saved_ms_of_57_sparse_layers"] == pytest.approx(4.2)
    assert found["extrapolated_saved_share_at_least"] == pytest.approx(0.105)
    assert found["saved_us_standard_error"] > 0
    assert saving([4.0], [3.7, 3.7], layers=6, reusers=3, freq=4)["saved_us_standard_error"] is None


def test_summary_compares_what_was_measured_in_both() -> None:
    def cell(prefill: float, token: float) -> dict[str, object]:
        return {"prefill_s": [prefill] * 3, "per_token_s": [token] * 3, "cached_at_prefill": 0}

    cells = {
        "off": {"8000x1": cell(0.2, 0.004), "8000x8": cell(1.0, 0.006)},
        "shared": {"8000x1": cell(0.18, 0.0039)},
        "skipped": {"8000x1": cell(0.17, 0.0038), "8000x8": cell(0.9, 0.005)},
    }
    rows = summary(cells, layers=6, sparse=5, freq=4)
    assert rows["8000x1"]["prefill_shared"]["ratio_to_off"] == 0.9
    assert rows["8000x1"]["per_token_skipped"]["saved_us_a_reusing_layer"] == pytest.approx(200 / 3, abs=0.01)
    assert "per_token_shared" not in rows["8000x8"]
    assert rows["8000x8"]["per_token_ms"]["skipped"] == {"median": 5.0, "min": 5.0, "max": 5.0, "n": 3}


def test_equality_says_where_answers_part() -> None:
    assert equality([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 7]]) == {
        "answers": 2,
        "equal": 1,
        "shortest_equal_prefix": 2,
        "distinct_tokens": 6,
    }
    tokens = {"cold": [[1, 2]], "cold again": [[1, 3]]}
    checks = {
        "shared": {
            "tokens": tokens,
            "hits": 3,
            "logprobs": [-0.1, -0.2],
            "logprobs again": [-0.1, -0.21],
            "configurations": {},
        },
        "skipped": {"tokens": tokens, "hits": 3, "logprobs": [-0.1, -0.25], "configurations": {}},
    }
    found = compare(checks)
    assert found["shared, asked again"]["largest_logprob_difference"] == pytest.approx(0.01)
    assert found["shared, asked again"]["cold"]["equal"] == 0
    assert found["skipped"]["largest_logprob_difference"] == pytest.approx(0.05)
    assert found["skipped"]["cold"]["equal"] == 1
    assert compare({}) == {}


def test_chosen_configurations_are_read_from_a_log_and_compared() -> None:
    log = (
        "Autotuning kernel score with config num_warps: 4\n"
        "Triton autotuning for function score,\nwith key as (128, 'torch.bfloat16'),\nfinished after 0.31s,\n"
        "best config selected: BLOCK: 64, num_warps: 4, maxnreg: None;\n"
        "[2026] a line of the server\n"
        "Triton autotuning for function topk,\nwith key as (16,),\nfinished after 0.02s,\n"
        "best config selected: num_warps: 8;\n"
    )
    score, topk = "score (128, 'torch.bfloat16')", "topk (16,)"
    chosen = chosen_configurations(log)
    assert chosen == {score: ["BLOCK: 64, num_warps: 4, maxnreg: None"], topk: ["num_warps: 8"]}
    assert chosen_otherwise(chosen, chosen) == {"kernels": 2, "other": {}, "in_one_only": []}
    other = {score: ["BLOCK: 64, num_warps: 8, maxnreg: None"]}
    assert chosen_otherwise(chosen, other) == {
        "kernels": 1, "other": {score: [chosen[score], other[score]]}, "in_one_only": [topk],
    }  # fmt: skip


def test_triton_still_says_what_it_chose() -> None:
    """The words that are looked for, in the installed version."""
    import inspect

    from triton.runtime import autotuner

    source = inspect.getsource(autotuner)
    assert "Triton autotuning for function {self.base_fn.__name__},\\nwith key as {key},\\n" in source
    assert "finished after {self.bench_time:.2f}s,\\nbest config selected: {self.best_config};" in source
