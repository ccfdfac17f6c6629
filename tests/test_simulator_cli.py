"""``agentserve simulate`` as its user sees it: tables, files, what they say, and what is said of bad input."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pyarrow.csv  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from click.testing import CliRunner

from agentserve.cli.simulate import command
from eval.bench.policy_noise import spread
from eval.bench.policy_table import halves
from eval.bench.simulator_grid import Result, Row
from eval.bench.simulator_output import findings
from radix_cache.simulator import Service
from traces import open_trace

TRACE = "generated:preset=tiny,sessions=6,seed=1"


def test_a_grid_is_shown_and_written(tmp_path: Path) -> None:
    options = ["--policy", "lru", "--policy", "gittins", "--capacity", "0.5x", "--capacity", "1.5x", "--orders", "2"]
    done = CliRunner().invoke(command, [TRACE, "--sessions", "3", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    csv = pyarrow.csv.read_csv(tmp_path / "results.csv")
    parquet = pyarrow.parquet.read_table(tmp_path / "results.parquet")
    assert csv.num_rows == parquet.num_rows == 2 * 2 * 3  # belady is added
    assert csv.column("rate").to_pylist() == pytest.approx(parquet.column("rate").to_pylist())
    assert set(csv.column("policy").to_pylist()) == {"lru", "gittins", "belady"}
    rows = parquet.to_pylist()
    best = [r["rate"] for r in rows if (r["policy"], r["capacity"]) == ("gittins", "1.5x")]
    assert f"{100 * sum(best) / 2:.2f}" in done.output
    assert "hits most" in done.output
    page = (tmp_path / "hit-rate.html").read_text()
    assert "gittins" in page
    assert "theoretical" in page


def row(policy: str, capacity: str, rate: float, admission: str = "none") -> Row:
    tokens = int(1000 * float(capacity[:-1]))
    return Row(
        policy, admission, capacity, tokens, tokens / 1000, 0, rate, 0.0, 0.9, 10, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0
    )


def test_findings_name_the_policy_to_take_and_the_memory_it_needs() -> None:
    rows = [row("lru", "0.5x", 0.30), row("gittins", "0.5x", 0.50), row("belady", "0.5x", 0.60)]
    rows += [row("gittins", "0.5x", 0.55, "gate:0.9")]
    rows += [row("lru", "1.0x", 0.88), row("gittins", "1.0x", 0.895), row("belady", "1.0x", 0.899)]
    assert findings(Result(rows, 1000.0, 0.9)) == [
        "0.5x: gittins with gate:0.9 hits most, 55.00 %, 25.00 points above lru, 5.00 points below belady.",
        "1.0x: gittins hits most, 89.50 %, 1.50 points above lru, 0.40 points below belady.",
        "Of these capacities, enough to be within a point of the theoretical rate: gittins 1,000 tokens (1.0x).",
    ]
    assert findings(Result(rows[:2], 1000.0, 0.9))[-1].startswith("None of these capacities")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "lruu"], "unknown eviction policy 'lruu'; choose from"),
        (["--policy", "ttl:x"], "ttl"),
        (["--admission", "door"], "door"),
        (["--capacity", "2y"], "'2y' is neither tokens (200000) nor a multiple"),
        (["--capacity", "3"], "less than one page"),
        (["--prefill-speed", "0"], "above 0 tokens per second"),
        (["--think-cap", "nan"], "think times"),
    ],
)
def test_bad_input_is_named(options: list[str], said: str) -> None:
    done = CliRunner().invoke(command, [TRACE, "--orders", "1", *options])
    assert done.exit_code == 1
    assert said in done.output
    assert "Traceback" not in done.output


def test_shares_of_several_orders_and_what_their_mean_is_worth() -> None:
    workload = halves(open_trace("generated:preset=tiny,sessions=16,seed=2"))["all"]
    found = spread(workload, Service.FIXED, "0.5x", 3)
    assert len(found["by_order"]) == 3
    assert found["mean"] == pytest.approx(fmean(found["by_order"]), abs=0.1)
    assert found["error_of_mean"] == pytest.approx(found["deviation"] / 3**0.5, abs=0.1)
    assert found["mean"] < 100
    with pytest.raises(ValueError, match="nothing is to be won over lru in order 0"):
        spread(workload, Service.FIXED, "50x", 2)
