"""Requests one at a time: the short way through the simulator gives, figure by figure, what the general core gives."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radix_cache.simulator import FlowSpec, Service, Setting, TurnSpec, Workload, WorkloadBuilder, run, simulate

PAGE = 4
NOTHING = np.empty(0, dtype=np.int64)


@st.composite
def prompts(draw: st.DrawFn) -> Workload:
    """Sessions of one request that share beginnings: ids are chained, so a path is its last id's ancestors."""
    parents = draw(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
    paths: list[list[int]] = [[]]
    for number, parent in enumerate(parents):
        paths.append([*paths[min(parent + 1, number)], number])
    builder = WorkloadBuilder(PAGE, global_ids=True)
    requests = st.tuples(
        st.integers(0, len(paths) - 1),
        st.integers(0, PAGE - 1),  # tokens of the partial page
        st.integers(0, 11),  # answer
        st.sampled_from([0.0, 0.5, 7.0]),  # think
        st.sampled_from([None, 0.0, 1.0, 2.5]),  # service
    )
    for session, (path, rest, output, think, service) in enumerate(draw(st.lists(requests, min_size=1, max_size=40))):
        ids = np.array(paths[path], dtype=np.int64)
        tokens = max(1, len(ids) * PAGE + rest)
        builder.add(str(session), [FlowSpec([TurnSpec(tokens, output, ids, NOTHING, think, service)])])
    return builder.build()


def assert_same(workload: Workload, setting: Setting) -> bool:
    """Compare with the general core, which a log of evictions calls for; whether the short way was taken at all."""
    reference = simulate(workload, run.unbounded(setting), log_evictions=True)
    short = simulate(workload, setting, reference=reference)
    general = simulate(workload, setting, reference=reference, log_evictions=True)
    for field in fields(short):
        if field.name == "fates":
            assert short.fates.tolist() == general.fates.tolist(), setting
        elif field.name != "log":
            assert getattr(short, field.name) == getattr(general, field.name), (field.name, setting)
    future = run._future(workload, setting, setting.policy == "belady", reference)
    return run._sequence(workload, setting, future) is not None


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    workload=prompts(),
    policy=st.sampled_from(["lru", "belady"]),
    pages=st.integers(1, 24),
    insert_output=st.booleans(),
    service=st.sampled_from(list(Service)),
    think_cap=st.sampled_from([0.25, np.inf]),
    seed=st.sampled_from([None, 3]),
)
def test_every_figure_is_the_general_cores(
    workload: Workload,
    policy: str,
    pages: int,
    insert_output: bool,
    service: Service,
    think_cap: float,
    seed: int | None,
) -> None:
    setting = Setting(
        policy=policy,
        capacity=pages * PAGE,
        sessions=1,
        insert_output=insert_output,
        service=service,
        think_cap=think_cap,
        order_seed=seed,
    )
    taken = assert_same(workload, setting)
    assert taken or policy == "belady"  # equal times leave the order of future uses open


def flat(count: int, seed: int) -> Workload:
    """Prompts of 1 to 40 pages that go on from an earlier one or begin anew."""
    rng = np.random.default_rng(seed)
    builder = WorkloadBuilder(PAGE, global_ids=True)
    paths: list[list[int]] = []
    fresh = 0
    for session in range(count):
        base = paths[rng.integers(max(0, session - 60), session)] if session and rng.random() < 0.7 else []
        more = int(rng.integers(1, 12))
        path = [*base[: int(rng.integers(0, len(base) + 1))], *range(fresh, fresh + more)][:40]
        fresh += more
        paths.append(path)
        turn = TurnSpec(len(path) * PAGE + 1, 6, np.array(path, dtype=np.int64), NOTHING, service_s=1.0)
        builder.add(str(session), [FlowSpec([turn])])
    return builder.build()


@pytest.mark.parametrize("policy", ["lru", "belady"])
def test_a_longer_sequence_is_played_the_short_way_and_hits_the_same(policy: str) -> None:
    workload = flat(4000, 1)
    for pages in (50, 300, 900):
        setting = Setting(policy=policy, capacity=pages * PAGE, sessions=1, service=Service.FIXED)
        assert assert_same(workload, setting)


@pytest.mark.parametrize(
    "other",
    [
        {"sessions": 2},
        {"policy": "fifo"},
        {"truncate": False},
        {"host_capacity": 400},
        {"admission": "gate:0.9"},
    ],
)
def test_anything_else_is_left_to_the_general_core(other: dict[str, object]) -> None:
    workload = flat(20, 2)
    setting = Setting(capacity=200, sessions=1)
    assert run._sequence(workload, setting, run.UNKNOWN) is not None
    assert run._sequence(workload, replace(setting, **other), run.UNKNOWN) is None  # type: ignore[arg-type]
