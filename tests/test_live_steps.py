"""Several requests in flight: SGLang's cache with our policy and the simulator, step by step the same. No server."""

from __future__ import annotations

import numpy as np
import pytest

from eval.bench.prediction_compare import compare
from eval.bench.prediction_faults import PAGE, timed_requests
from eval.bench.prediction_workload import Played
from radix_cache.simulator.recorded import FINISH, KEEP, MATCH, play_steps
from tests.step_scheduler import StepScheduler
from tests.test_live_prediction import THINK, as_run
from traces import open_trace

CAPACITY = 44 * PAGE


def _trace(seed: int) -> Played:
    sessions = list(open_trace(f"generated:preset=tiny,sessions=10,seed={seed}"))
    return as_run(timed_requests(sessions, 10, THINK))


@pytest.fixture(scope="module", name="played")
def _played() -> Played:
    return _trace(3)


@pytest.fixture(scope="module", name="traces")
def _traces(played: Played) -> dict[int, Played]:
    return {3: played, 8: _trace(8)}


_POLICIES = ("lru", "ttl:20", "gittins", "lfu", "slru")
# In the other trace chunks end inside nodes that others have, which only whole nodes and hit counts can tell.
_EVERY_WAY = [(e, t, 3) for t in (True, False) for e in _POLICIES] + [("gittins", False, 8), ("lfu", False, 8)]


@pytest.mark.parametrize(("eviction", "truncate", "seed"), _EVERY_WAY)
def test_the_simulator_hits_what_the_live_cache_hits(
    traces: dict[int, Played], eviction: str, truncate: bool, seed: int
) -> None:
    played = traces[seed]
    live = StepScheduler(
        eviction, CAPACITY, PAGE, in_flight=4, chunk=384, retract=0.05, truncate=truncate, sessions_at_once=6
    )
    hits, steps = live.run(played)
    said = play_steps(played.workload, steps, policy=eviction, capacity=CAPACITY, truncate=truncate)
    # What several in flight bring: chunks, retraction, requests that are looked at and have to wait.
    assert min(live.retracted, live.chunked, live.looks - len(hits) - live.retracted) > 5
    assert said.hit.tolist() == hits
    assert said.evicted == live.evicted > 2 * CAPACITY
    assert said.refused == 0
    assert sum(hits) > 0.2 * played.workload.prompt_tokens


def test_a_comparison_plays_the_steps_where_it_has_them(played: Played) -> None:
    live = StepScheduler("lru", CAPACITY, PAGE, in_flight=4, chunk=384, retract=0.0, truncate=True, sessions_at_once=6)
    hits, steps = live.run(played)
    for one, hit in zip(played.sent, hits, strict=True):
        one.record.cached_tokens = hit
    assert compare(played._replace(steps=steps), policy="lru", capacity=CAPACITY).same == 1.0
    # Whole requests, in the trace's own times, are something else.
    assert compare(played, policy="lru", capacity=CAPACITY).same < 0.95


def test_steps_that_miss_something_are_refused(played: Played) -> None:
    live = StepScheduler("lru", CAPACITY, PAGE, in_flight=2, chunk=384, retract=0.0, truncate=True, sessions_at_once=4)
    _, steps = live.run(played)
    for kind, name in ((FINISH, "finish once"), (MATCH, "match")):
        first = int(np.flatnonzero(steps["kind"] == kind)[0])
        which = int(steps["which"][first])
        fewer = steps[(steps["kind"] != kind) | (steps["which"] != which)]
        with pytest.raises(ValueError, match=f"each request must {name}; request {which} does"):
            play_steps(played.workload, fewer, policy="lru", capacity=CAPACITY)
    with pytest.raises(ValueError, match="knows the future"):
        play_steps(played.workload, steps, policy="belady", capacity=CAPACITY)
    assert (steps["kind"] == KEEP).sum() > 0
