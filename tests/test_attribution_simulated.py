"""Attribution of simulated runs: exact on random workloads, with every kind of loss, and by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eval.attribution.live import attribute_with_events
from eval.bench.report_scale import as_run
from radix_cache.attribution import Attribution, CacheKind, Cause, EvictedBy, Loss, VictimState
from radix_cache.attribution.simulated import explain
from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, Outcome, Service, Setting, TurnSpec, Workload, simulate
from tests.test_simulator_naive import PAGE, Sessions, build, traces


def causes(found: list[Attribution]) -> Counter[Cause]:
    total: Counter[Cause] = Counter()
    for one in found:
        for loss in one.losses:
            total[loss.cause] += loss.tokens
    return total


@given(
    sessions=traces(),
    capacity=st.integers(8, 60),
    clients=st.integers(1, 4),
    policy=st.sampled_from(["lru", "gittins"]),
    admission=st.sampled_from(["none", "parking:1.1"]),
    truncate=st.booleans(),
    insert_output=st.booleans(),
    host=st.sampled_from([0, 0, 10]),
)
@settings(max_examples=100, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_is_unexplained_in_random_runs(
    sessions: Sessions,
    capacity: int,
    clients: int,
    policy: str,
    admission: str,
    truncate: bool,
    insert_output: bool,
    host: int,
) -> None:
    """Every token between theory and the simulator's hits has a cause, and the causes are the simulator's own story."""
    workload = build(sessions, PAGE)
    setting = Setting(
        policy=policy, capacity=capacity * PAGE, sessions=clients, admission=admission, service=Service.FIXED,
        truncate=truncate, insert_output=insert_output, host_capacity=host * PAGE,
    )  # fmt: skip
    outcome = simulate(workload, setting, log_evictions=True)
    found = explain(workload, outcome)
    hits = outcome.fates["hit"] + outcome.fates["host"]
    assert [one.realized for one in found] == hits.tolist()
    total = causes(found)
    assert total[Cause.UNEXPLAINED] == 0
    assert total.total() == sum(one.gap for one in found)
    assert total[Cause.NOT_RESTORED] == total[Cause.PAGE_ALIGNMENT] == 0
    if not host:
        assert total[Cause.OFFLOAD_LOST] == 0
    if insert_output and not outcome.rejected:
        assert total[Cause.NOT_ADMITTED] == 0
    if not outcome.evictions:
        assert total[Cause.EVICTED] == 0
    if not host and not outcome.rejected:
        assert_same_from_events(workload, outcome, found)


def assert_same_from_events(workload: Workload, outcome: Outcome, found: list[Attribution]) -> None:
    """The same run as records and cache events, which do not say when a request was matched or who evicted."""
    _, records, events = as_run(workload, outcome, found)
    live = attribute_with_events(records, records, events, CacheKind(workload.page_size))
    order = np.argsort(outcome.fates["done_stamp"], kind="stable")
    for number, one in zip(order.tolist(), live, strict=True):
        assert [loss._replace(culprit=None) for loss in one.losses] == [
            loss._replace(culprit=None) for loss in found[number].losses
        ]
        culprits = [None if loss.culprit is None else int(order[loss.culprit]) for loss in one.losses]
        assert culprits == [loss.culprit for loss in found[number].losses]


def test_the_log_changes_nothing_and_grows_with_the_run() -> None:
    workload = build([[FlowSpec([turn(range(k, k + 6))])] for k in range(0, 600, 6)], PAGE)
    setting = Setting(capacity=8 * PAGE, sessions=2)
    plain, logged = simulate(workload, setting), simulate(workload, setting, log_evictions=True)
    assert plain.fates.tolist() == logged.fates.tolist()
    assert len(plain.log) == 0
    assert len(logged.log) == logged.evictions > 50


def turn(pages: range, think: float = 0.0, stop: Stop = Stop.TOOL) -> TurnSpec:
    """Whole pages and one token more, a second of service, no answer."""
    ids = np.array(pages, dtype=np.int64)
    return TurnSpec(len(pages) * PAGE + 1, 0, ids, np.empty(0, np.int64), think, 1.0, stop)


def test_a_new_session_takes_the_memory_of_one_that_waits() -> None:
    """Ten pages: the first session's 6 wait for a tool when another one needs 7, and 3 of them are gone."""
    waiting = FlowSpec([turn(range(6), stop=Stop.TOOL), turn(range(8), think=5.0)])
    workload = build([[waiting], [FlowSpec([turn(range(100, 106))])]])
    outcome = simulate(workload, Setting(capacity=10 * PAGE, sessions=2, service=Service.FIXED), log_evictions=True)
    found = explain(workload, outcome)
    assert [one.losses for one in found] == [
        (),
        (Loss(Cause.EVICTED, 3 * PAGE, 3 * PAGE, EvictedBy.NEW_SESSION, VictimState.TOOL_WAIT, 2),),
        (),
    ]


def test_a_request_larger_than_the_cache_is_not_admitted() -> None:
    flow = FlowSpec([turn(range(6)), turn(range(12)), turn(range(7))])
    workload = build([[flow]])
    outcome = simulate(workload, Setting(capacity=10 * PAGE, sessions=1), log_evictions=True)
    assert causes(explain(workload, outcome)) == {Cause.NOT_ADMITTED: 6 * PAGE + PAGE}
    # the last turn's seventh page was only in the prompt that was refused
    assert explain(workload, outcome)[2].realized == 6 * PAGE


def test_runs_without_a_log_are_refused() -> None:
    workload = build([[FlowSpec([turn(range(k, k + 6))])] for k in range(0, 60, 6)])
    with pytest.raises(ValueError, match="log_evictions"):
        explain(workload, simulate(workload, Setting(capacity=8 * PAGE)))
    through = Setting(capacity=8 * PAGE, host_capacity=80 * PAGE, write_through=True)
    with pytest.raises(ValueError, match="write-through"):
        explain(workload, simulate(workload, through, log_evictions=True))
