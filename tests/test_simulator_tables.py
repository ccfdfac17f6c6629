"""The tables of eviction and admission: their shape, what must hold in any of them, and waits by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eval.bench.policy_table import (
    HALVES,
    Line,
    Plan,
    admission_table,
    as_markdown,
    halves,
    in_report_half,
    policy_tables,
)
from eval.bench.policy_waits import run_waits
from eval.bench.simulator_grid import BELADY
from radix_cache.eviction import eviction_policy
from radix_cache.features import FlowState, NodeFeatures, Stop
from radix_cache.gaps import AGE_EDGES, LEAD_CLASSES, LEADS, GapTable, gap_row, rank_row
from radix_cache.simulator import FlowSpec, Service, Setting, TurnSpec, Workload, WorkloadBuilder, simulate
from traces.model import Session
from traces.readers import open_trace


def tables(sessions: Iterator[Session], plan: Plan) -> tuple[Line, int]:
    """A report, and how many runs it took."""
    workloads = halves(sessions)
    said: list[str] = []
    report = policy_tables(workloads, plan, said.append)
    report["admission"] = admission_table(workloads["report"], plan, said.append)
    return report, len(said)


def check(report: Line, plan: Plan) -> None:
    """What holds for any trace."""
    known = {(r["policy"], r["capacity"]): r["rate"] for r in report["known_order"]["rows"]}
    for (policy, capacity), rate in known.items():
        assert 0 <= rate <= known[BELADY, capacity], (policy, capacity)
    for part in ("policies", "known_order", "admission"):
        assert all(row["rate"] <= report[part]["theoretical"] for row in report[part]["rows"])
    assert {r["half"] for r in report["shares"]} == set(HALVES)
    for row in report["shares"]:
        if row["share"] is not None:
            assert row["own"] == pytest.approx(row["lru"] + row["share"] * (row["belady"] - row["lru"]))
    for row in report["admission"]["rows"]:
        for kind in ("turn", "start"):
            percentiles = [row[f"{kind}_{name}"] for name in ("p50", "p90", "p99")]
            assert sorted(percentiles) == percentiles
            assert percentiles[0] >= 0
            assert row[f"{kind}_mean"] > 0
        assert row["sessions_waiting"] <= plan.sessions
        assert row["admission"].startswith("gate") or row["sessions_waiting"] == pytest.approx(0, abs=1e-6)
        assert row["admission"].startswith("parking") or row["parkings"] == 0


def test_tables_of_a_generated_trace() -> None:
    plan = Plan(
        sessions=4,
        orders=1,
        capacities=("0.5x", "1.0x"),
        share_capacities=("1.0x",),
        admission_capacities=("0.5x",),
        policies=("lru", "gittins", BELADY),
    )
    report, runs = tables(open_trace("generated:sessions=16,seed=3,max_turns=30"), plan)
    assert runs == plan.runs
    check(report, plan)
    gated = {(r["policy"], r["admission"]): r for r in report["admission"]["rows"]}
    assert gated["lru", "gate:0.9"]["rate"] > gated["lru", "none"]["rate"]
    assert gated["lru", "gate:0.9"]["sessions_waiting"] > 0
    text = as_markdown({"command": "the command", **report})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert sum(line.startswith("| gittins |") for line in rows) == 1
    assert sum(line.startswith("| lru |") for line in rows) == 2
    shares = [line for line in rows if line.startswith(("| parallel |", "| fixed |"))]
    assert len(shares) == 2 * len(HALVES)
    columns = [line.count("|") for line in shares]
    assert set(columns) == {10}
    assert all(re.search(r"\d to -?\d|none to close", line) for line in shares)


@pytest.mark.real_traces
def test_tables_of_recorded_sessions(weka_archive: Path) -> None:
    sessions = open_trace(str(weka_archive), limit=40)
    plan = Plan(sessions=6, orders=1, capacities=("1.0x",), share_capacities=("1.0x",), admission_capacities=("0.5x",))
    report, _ = tables(sessions, plan)
    check(report, plan)
    shares = {(r["service"], r["half"]): r["share"] for r in report["shares"]}
    assert min(shares.values()) > 0.3, shares


def test_a_half_needs_sessions() -> None:
    (session,) = open_trace("generated:sessions=1")
    empty = "tune" if in_report_half(session.id) else "report"
    with pytest.raises(ValueError, match=f"no session of the trace falls into the half '{empty}'"):
        halves([session])


def one_turn_each(sessions: int) -> Workload:
    """Prompts of 8 tokens that share nothing, and answers of 8."""
    builder = WorkloadBuilder(4)
    for number in range(sessions):
        turn = TurnSpec(8, 8, np.array([1, 2]), np.array([3]), stop=Stop.TURN)
        builder.add(f"s{number}", [FlowSpec([turn])])
    return builder.build()


@pytest.mark.parametrize(
    ("clients", "admission", "waits", "sessions_waiting", "requests_waiting"),
    [
        (1, "none", [1, 1], 0, 0),  # the second is wanted when the first has ended
        (2, "none", [1, 2], 0, 1 / 3),  # the second queues for a second of three
        (2, "gate:0.1", [1, 3], 2 / 4, 0),  # the second is held until the first has ended
    ],
)
def test_waits_by_hand(
    clients: int, admission: str, waits: list[float], sessions_waiting: float, requests_waiting: float
) -> None:
    workload = one_turn_each(2)
    setting = Setting(
        capacity=64,
        sessions=clients,
        admission=admission,
        service=Service.QUEUED,
        prefill_speed=8.0,
        decode_speed=8.0,
    )
    outcome = simulate(workload, setting)
    found = run_waits(workload, outcome)
    assert found.turns == found.starts
    assert found.turns.mean == pytest.approx(np.mean(waits))
    assert found.turns.p99 == pytest.approx(np.percentile(waits, 99))
    assert found.sessions_waiting == pytest.approx(sessions_waiting)
    assert found.requests_waiting == pytest.approx(requests_waiting)


def features(context: float, **changes: float) -> NodeFeatures:
    known = dict.fromkeys(NodeFeatures._fields, 0.0)
    known |= {"stop": float(Stop.TOOL), "pace": -1.0, "state": float(FlowState.LIVE), "sharers": 1.0}
    return NodeFeatures(**{**known, "context": context, **changes})


def test_a_long_context_outranks_a_short_one_by_its_prefill_time() -> None:
    gaps = GapTable()
    policy, timeless = eviction_policy("gittins:1000"), eviction_policy("gittins:inf")
    first = policy.learned_groups[0]
    short, long = (gaps.ranks[policy.group(features(c)) - first] for c in (100.0, 20_000.0))
    assert long - short == pytest.approx(np.full(len(short), LEADS[rank_row(0, 20.0)]))
    assert timeless.group(features(1e9)) == timeless.group(features(1.0)) == policy.group(features(1.0))
    assert policy.group(features(20_000.0, superseded=1.0)) < first


def test_ranks_without_a_lead_are_the_waiting_time_of_a_hit() -> None:
    """All gaps are 10 s: just after a use a hit costs 10 s of waiting, and less with every second that has passed."""
    gaps = GapTable()
    row = gap_row(Stop.TOOL, -1.0)
    for _ in range(512):
        gaps.observe(row, 10.0)
    costs = AGE_EDGES[-1] - gaps.ranks[row * LEAD_CLASSES]
    assert costs[0] == pytest.approx(10.0, rel=0.1)
    until = np.searchsorted(AGE_EDGES, 10.0, side="right") - 1
    assert (np.diff(costs[:until]) < 0).all()
    assert costs[until + 1] > 20 * costs[until]  # one that did not come in time will not come soon


def test_a_prefill_speed_must_be_above_zero() -> None:
    with pytest.raises(ValueError, match="prefill speed must be above 0 tokens per second, got -1"):
        eviction_policy("gittins:-1")
