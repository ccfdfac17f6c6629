"""The live cache and the simulator on the same events: the same hits for every request. No server."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.bench.prediction_compare import compare
from eval.bench.prediction_faults import PAGE, SERVICE_S, Faults, Request, drive, table_growth, timed_requests
from eval.bench.prediction_live import Policy, expected_contexts, measured_contexts
from eval.bench.prediction_workload import Played, played_run
from eval.bench.sglang_cache_driver import CacheDriver
from radix_cache.simulator.recorded import ARRIVE, END, FINISH, START, play
from traces import open_trace
from traces.replay.clients.base import conversation_name
from traces.replay.rebuild import Sent
from traces.replay.record import RequestRecord, RunEvent
from traces.replay.schedule import Think

CLIENTS = 6
THINK = Think.parse("capped:60")


@pytest.fixture(scope="module", name="requests")
def _requests() -> list[Request]:
    sessions = list(open_trace("generated:preset=tiny,sessions=24,seed=3"))
    return timed_requests(sessions, CLIENTS, THINK)


@pytest.fixture(scope="module", name="capacity")
def _capacity() -> int:
    sessions = list(open_trace("generated:preset=tiny,sessions=24,seed=3"))
    return int(0.8 * expected_contexts(sessions, CLIENTS, THINK, SERVICE_S)) // PAGE * PAGE


def record(request: Request, turn: int) -> RequestRecord:
    return RequestRecord(
        session=request.session, flow=request.flow, turn=turn, ready_s=request.start_s, sent_s=request.start_s,
        first_token_s=request.start_s, done_s=request.done_s, think_s=0.0, prompt_tokens=len(request.prompt),
        prompt_tokens_reported=len(request.prompt), output_tokens_wanted=len(request.answer),
        output_tokens=len(request.answer), cached_tokens=None, session_lcp=0, session_output_lcp=0, shared_lcp=0,
        shared_output_lcp=0, ready_lcp=0, recorded_stop=request.stop_reason,
    )  # fmt: skip


def as_run(requests: list[Request]) -> Played:
    turns: dict[tuple[str, str], int] = {}
    sent, ends = [], []
    for request in requests:
        key = (request.session, request.flow)
        turns[key] = turns.get(key, -1) + 1
        prompt, answer = (np.array(ids, dtype=np.int32) for ids in (request.prompt, request.answer))
        sent.append(Sent(record(request, turns[key]), prompt, answer))
        if request.last:
            ends.append(RunEvent(at_s=request.done_s, kind="ended", session=request.session, flow=request.flow))
    return played_run(sent, ends, PAGE, told=True)


def live_hits(played: Played, eviction: str, capacity: int) -> list[int]:
    """The same events through SGLang's cache with our policy."""
    driver = CacheDriver(eviction, capacity, PAGE)
    keys = list(dict.fromkeys((s.record.session, s.record.flow) for s in played.sent))
    hits = [0] * len(played.sent)
    stops = played.workload.requests["stop"]
    for event in np.sort(played.events, order="time", kind="stable"):
        number, now = int(event["which"]), float(event["time"])
        if event["kind"] == END:
            driver.end(conversation_name(*keys[number]), now)
            continue
        one = played.sent[number]
        if event["kind"] == ARRIVE:
            name = conversation_name(one.record.session, one.record.flow)
            driver.arrive(str(number), one.prompt.tolist(), name, now)
        elif event["kind"] == START:
            # As ``play``: the page that a server keeps at hand is shared when memory is short.
            hits[number] = driver.start(str(number), now, int(played.held_pages[number]), spare_pages=1) or 0
        else:
            assert event["kind"] == FINISH
            driver.finish(str(number), one.output.tolist(), stops[number], now)
    driver.check()
    return hits


@pytest.mark.parametrize("eviction", ["lru", "ttl:20", "gittins", "lfu", "slru"])
def test_the_simulator_hits_what_the_live_cache_hits(requests: list[Request], capacity: int, eviction: str) -> None:
    played = as_run(requests)
    said = play(played.workload, played.events, policy=eviction, capacity=capacity, held_pages=played.held_pages)
    assert said.evicted > 3 * capacity
    assert said.hit.tolist() == live_hits(played, eviction, capacity)


def test_a_comparison_says_where_and_why_a_run_differs(requests: list[Request]) -> None:
    played = as_run(requests)
    large = 1 << 22
    said = play(played.workload, played.events, policy="lru", capacity=large)
    for one, hit in zip(played.sent, said.hit.tolist(), strict=True):
        one.record.cached_tokens = hit
    assert compare(played, policy="lru", capacity=large).same == 1.0
    busy = max(range(len(played.sent)), key=lambda n: said.hit[n])
    played.sent[busy].record.cached_tokens = 0
    off = compare(played, policy="lru", capacity=large)
    assert [(d.live, d.predicted) for d in off.differences] == [(0, said.hit[busy])]
    assert off.points_off == pytest.approx(100 * said.hit[busy] / sum(len(s.prompt) for s in played.sent))
    assert sum(off.reasons.values()) == 1


def test_a_recording_without_a_requests_end_is_refused(requests: list[Request]) -> None:
    played = as_run(requests)
    short = played.events[1:]
    with pytest.raises(ValueError, match=r"must arrive once; request 0 does 0 times"):
        play(played.workload, short, policy="lru", capacity=1 << 20)
    with pytest.raises(ValueError, match="knows the future"):
        play(played.workload, played.events, policy="belady", capacity=1 << 20)


def test_faults_cost_hits_but_neither_memory_nor_order(requests: list[Request], capacity: int) -> None:
    right, _ = drive(requests, Faults("none"), "gittins", capacity)
    lost, _ = drive(requests, Faults("ends", end_lost=1.0, wrong_id=0.3), "gittins", capacity)  # drive checks slots
    back, _ = drive(requests, Faults("clock", clock=lambda now: -now), "gittins", capacity)
    assert right > max(lost, back)
    assert min(lost, back) > 0


def test_the_session_table_does_not_grow_with_sessions_that_never_end() -> None:
    (few, small), (many, large) = table_growth(256, limit=256), table_growth(2048, limit=256)
    assert few == many == 256
    assert large < 1.1 * small


def test_contexts_before_a_run_are_those_measured_in_it(requests: list[Request]) -> None:
    played = as_run(requests)
    sessions = list(open_trace("generated:preset=tiny,sessions=24,seed=3"))
    measured = measured_contexts([s.record for s in played.sent], CLIENTS)
    assert math.isclose(expected_contexts(sessions, CLIENTS, THINK, SERVICE_S), measured, rel_tol=0.15)


def test_policies_are_named_as_they_are_given() -> None:
    both = Policy.parse("gittins+gate:0.9")
    assert (both.eviction, both.admission, both.name, both.ours) == ("gittins", "gate:0.9", "gittins+gate:0.9", True)
    assert not Policy.parse("sglang").ours
