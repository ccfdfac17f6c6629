"""The simulator against a block-by-block cache: the same hits for every request, whatever the policy.

The examples are the same in every run. ``AGENTSERVE_EXAMPLES=5000 pytest tests/test_simulator_naive.py`` tries that
many others.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from eval.bench.simulator_workload import flow_specs as real_flows
from radix_cache.eviction import eviction_names, eviction_policy
from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, Outcome, Service, Setting, TurnSpec, Workload, WorkloadBuilder, simulate
from radix_cache.simulator.run import unbounded
from radix_cache.simulator.uses import known_future
from tests.naive_cache import NaiveCache
from traces import open_trace

PAGE = 4
Sessions = list[list[FlowSpec]]


def build(sessions: Sessions, page: int = PAGE, *, global_ids: bool = False) -> Workload:
    builder = WorkloadBuilder(page, global_ids=global_ids)
    for number, flows in enumerate(sessions):
        builder.add(f"s{number}", flows)
    return builder.build()


def naive_hits(
    sessions: Sessions, workload: Workload, outcome: Outcome, *, global_ids: bool = False
) -> tuple[list[int], list[int]]:
    """Replay the outcome's event order on the naive cache; device and host hits per request."""
    setting = outcome.setting
    policy = eviction_policy(setting.policy)
    order: Sequence[int] = ()
    elapsed: Sequence[float] = ()
    expected: Sequence[float] = ()
    if policy.offline:
        reference = simulate(workload, unbounded(setting)).fates
        future = known_future(
            workload,
            reference,
            capacity=setting.capacity,
            think_cap=setting.think_cap,
            decode_speed=setting.decode_speed,
        )
        pages = -(-(workload.requests["prompt"] + workload.requests["output"]) // workload.page_size)
        fits = pages <= setting.capacity // workload.page_size
        order = [int(n) for n in np.argsort(reference["start_stamp"]) if fits[n]]
        elapsed, expected = future.plans["elapsed"].tolist(), future.plans["expected"].tolist()
    cache = NaiveCache(
        sessions,
        workload.page_size,
        setting.capacity // workload.page_size,
        policy,
        truncate=setting.truncate,
        insert_output=setting.insert_output,
        spare=setting.spare_pages,
        host_capacity=setting.host_capacity // workload.page_size,
        host_policy=eviction_policy(setting.host_policy),
        host_takes_all=setting.host_takes_all,
        known_order=order,
        elapsed=elapsed,
        expected=expected,
        global_ids=global_ids,
    )
    events = []
    for number, fate in enumerate(outcome.fates):
        events.append((int(fate["ready_stamp"]), cache.ready, number, float(fate["ready"])))
        events.append((int(fate["start_stamp"]), cache.start, number, float(fate["start"])))
        events.append((int(fate["done_stamp"]), cache.done, number, float(fate["done"])))
    for _, event, number, now in sorted(events, key=lambda e: e[0]):
        event(number, now)
    numbers = range(len(outcome.fates))
    return [cache.hits[n] for n in numbers], [cache.host_hits[n] for n in numbers]


def assert_same(sessions: Sessions, workload: Workload, setting: Setting) -> Outcome:
    outcome = simulate(workload, setting)
    device, host = naive_hits(sessions, workload, outcome)
    assert outcome.fates["hit"].tolist() == device, setting
    assert outcome.fates["host"].tolist() == host, setting
    return outcome


@st.composite
def flow_specs(draw: st.DrawFn, base: int, prefix: list[int], turns: int) -> FlowSpec:
    """Conversations that mostly append, sometimes go back, sometimes repeat a prompt."""
    ids = list(prefix)
    history: list[list[int]] = []
    specs = []
    fresh = base
    shapes = draw(
        st.lists(
            st.tuples(
                st.integers(0, 4),  # pages appended
                st.integers(0, 9),  # 0: go back to an earlier prompt, 1: lose two pages
                st.integers(0, PAGE - 1),  # tokens of the partial page
                st.integers(0, 14),  # answer
                st.sampled_from([0.0, 0.5, 3.0, 7.0, 40.0]),
                st.sampled_from([0.0, 1.0, 2.5]),
                st.sampled_from(list(Stop)),
            ),
            min_size=1,
            max_size=turns,
        )
    )
    for more, jump, rest, out, think, service, stop in shapes:
        if jump == 0 and history:
            ids = list(history[len(history) // 2])
        elif jump == 1:
            ids = ids[:-2]
        ids = ids + list(range(fresh, fresh + more))
        fresh += more
        history.append(list(ids))
        tokens = len(ids) * PAGE + rest
        specs.append((max(tokens, 1), list(ids), out, think, service, stop))
    made = []
    for k, (tokens, pages, out, think, service, stop) in enumerate(specs):
        following = specs[k + 1][1] if k + 1 < len(specs) else []
        goes_on = following[: len(pages)] == pages
        answer = following[len(pages) :] if goes_on else []
        as_array = np.array(pages, dtype=np.int64)
        made.append(TurnSpec(tokens, out, as_array, np.array(answer, dtype=np.int64), think, service, stop))
    return FlowSpec(made)


@st.composite
def traces(draw: st.DrawFn, shared: bool = True) -> Sessions:
    sessions = []
    for _ in range(draw(st.integers(1, 5))):
        prefix = list(range(900, 900 + draw(st.integers(0, 3))))
        flows = [draw(flow_specs(1000, prefix, 7))]
        if draw(st.booleans()):
            # A subagent that begins like its parent: two flows use the same pages.
            sub = draw(flow_specs(2000, prefix if shared else [], 3))
            flows.append(sub._replace(spawn_after=draw(st.integers(0, len(flows[0].turns) - 1))))
        sessions.append(flows)
    return sessions


ONLINE = [name for name in eviction_names() if not eviction_policy(name).offline]
POLICIES = [*ONLINE, "tlru:12", "ttl:5", "gittins:2"]  # with small parameters: the traces are small
EXAMPLES = int(os.environ.get("AGENTSERVE_EXAMPLES", "0"))
SEARCH = settings(
    max_examples=EXAMPLES or 200,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def conversation(first: int, *turns: tuple[int, int, int, float]) -> FlowSpec:
    """Turns of (prompt tokens, output tokens, pages of the answer that come back, think time) over one line of pages
    from ``first`` on."""
    line = np.arange(first, first + 10)
    specs = []
    for tokens, output, answer, think in turns:
        pages = tokens // PAGE
        specs.append(TurnSpec(tokens, output, line[:pages], line[pages : pages + answer], think, 0.0))
    return FlowSpec(specs)


# A prompt ends inside a radix node, and its own start evicts what hangs below: only that, not the part it matched.
MATCH_SPLITS_A_NODE: Sessions = [
    [conversation(1000, (8, 0, 1, 0.0), (12, 0, 0, 3.0), (4, 1, 2, 0.0), (13, 0, 0, 0.0))],
    [
        conversation(
            1000,
            *[(20, 0, 0, 0.0), (20, 9, 1, 0.5), (25, 4, 0, 0.5), (21, 0, 1, 3.0), (24, 0, 0, 3.0), (24, 0, 0, 0.0)],
            (20, 6, 0, 0.0),
        ),
        conversation(1000, (4, 0, 0, 0.0))._replace(spawn_after=0),
    ],
    [conversation(1000, (1, 0, 0, 0.0), (1, 0, 0, 0.0))],
    [conversation(1000, (16, 1, 0, 0.5), (16, 0, 0, 0.0), (16, 0, 2, 0.0), (24, 0, 0, 0.0))],
]


@given(
    sessions=traces(),
    capacity=st.integers(8, 90),
    clients=st.integers(1, 4),
    truncate=st.booleans(),
    insert_output=st.booleans(),
    spare_pages=st.integers(0, 2),
)
@example(sessions=MATCH_SPLITS_A_NODE, capacity=14, clients=4, truncate=False, insert_output=True, spare_pages=0)
@SEARCH
@pytest.mark.timeout(0 if EXAMPLES else 1800)
def test_same_hits_as_page_by_page(
    sessions: Sessions, capacity: int, clients: int, truncate: bool, insert_output: bool, spare_pages: int
) -> None:
    workload = build(sessions)
    for policy in POLICIES:
        setting = Setting(
            policy=policy,
            capacity=capacity * PAGE,
            sessions=clients,
            service=Service.FIXED,
            truncate=truncate,
            insert_output=insert_output,
            spare_pages=spare_pages,
        )
        assert_same(sessions, workload, setting)


# A flow leaves a branch and comes back to it: by an answer, and by a prompt whose last page is on it. Whoever still
# takes that branch for abandoned evicts it before pages of others that were used longer ago.
ANSWER_LEADS_BACK: Sessions = [
    [conversation(1000, (24, 13, 0, 3.0), (12, 13, 1, 0.0))],
    [conversation(2000, (24, 0, 1, 0.5), (16, 13, 3, 0.0), (24, 5, 3, 3.0), (24, 5, 2, 3.0))],
]
PROMPT_LEADS_BACK: Sessions = [
    [conversation(1000, (24, 9, 0, 3.0), (20, 5, 2, 0.5))],
    [conversation(2000, (20, 9, 1, 3.0), (12, 0, 0, 0.0), (24, 13, 3, 0.0), (24, 13, 2, 0.5))],
]


@pytest.mark.parametrize(("sessions", "pages"), [(ANSWER_LEADS_BACK, 16), (PROMPT_LEADS_BACK, 12)])
def test_a_branch_that_a_flow_comes_back_to_is_not_abandoned(sessions: Sessions, pages: int) -> None:
    setting = Setting(policy="ttl:5", capacity=pages * PAGE, sessions=3, service=Service.FIXED)
    assert_same(sessions, build(sessions), setting)


@given(
    sessions=traces(shared=False),
    capacity=st.integers(8, 90),
    clients=st.integers(1, 4),
    truncate=st.booleans(),
    insert_output=st.booleans(),
)
@SEARCH
@pytest.mark.timeout(0 if EXAMPLES else 1800)
def test_belady_same_hits_as_page_by_page(
    sessions: Sessions, capacity: int, clients: int, truncate: bool, insert_output: bool
) -> None:
    """The time of a next use is reckoned when a node becomes a leaf. Where several flows use a node that can be
    out of date, so flows share nothing here."""
    setting = Setting(
        policy="belady",
        capacity=capacity * PAGE,
        sessions=clients,
        service=Service.FIXED,
        truncate=truncate,
        insert_output=insert_output,
    )
    assert_same(sessions, build(sessions), setting)


@given(
    sessions=traces(),
    capacity=st.integers(8, 60),
    host_capacity=st.integers(1, 60),
    clients=st.integers(1, 4),
    truncate=st.booleans(),
    insert_output=st.booleans(),
    takes_all=st.booleans(),
)
@SEARCH
@pytest.mark.timeout(0 if EXAMPLES else 1800)
def test_same_hits_with_a_host_tier(
    sessions: Sessions,
    capacity: int,
    host_capacity: int,
    clients: int,
    truncate: bool,
    insert_output: bool,
    takes_all: bool,
) -> None:
    workload = build(sessions)
    for policy, host_policy in (("lru", "lru"), ("gittins", "ttl:5")):
        setting = Setting(
            policy=policy,
            capacity=capacity * PAGE,
            sessions=clients,
            service=Service.FIXED,
            truncate=truncate,
            insert_output=insert_output,
            host_capacity=host_capacity * PAGE,
            host_policy=host_policy,
            host_takes_all=takes_all,
        )
        assert_same(sessions, workload, setting)


@pytest.mark.real_traces
@pytest.mark.timeout(1800)
def test_same_hits_on_real_sessions(weka_archive: Path) -> None:
    """30 sessions as they come, by large pages: the other side looks at all of them for each victim."""
    page = 8192
    sessions = [real_flows(session, page, share_heads=False) for session in open_trace(str(weka_archive), limit=30)]
    assert len(sessions) == 30
    workload = build(sessions, page)
    base = Setting(sessions=8, think_cap=60.0)
    live = simulate(workload, unbounded(base)).mean_context
    for policy in eviction_names():
        outcome = assert_same(sessions, workload, replace(base, policy=policy, capacity=int(0.9 * live)))
        assert sum(outcome.evicted.values()) > live
