"""A scheduler in small over the live cache, for tests: several requests in flight, chunks, decode steps, retraction.

It decides as freely as a real one may; what it did is written down as ``recorded.STEP``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.bench.prediction_workload import Played
from eval.bench.sglang_cache_driver import CacheDriver
from radix_cache.features import Stop
from radix_cache.simulator.layout import Records
from radix_cache.simulator.recorded import (
    ARRIVE,
    DECODE,
    END,
    FINISH,
    KEEP,
    MATCH,
    PREFILL,
    RELEASE,
    STEP,
)
from traces.replay.clients.base import conversation_name

STEP_S = 0.5


@dataclass(eq=False)
class _Job:
    number: int
    name: str
    prompt: list[int]
    answer: list[int]
    stop: Stop
    done: int = 0  # tokens with KV
    decoded: int = 0  # tokens of the answer with KV
    hit: int | None = None

    @property
    def target(self) -> int:
        """Tokens to prefill."""
        return len(self.prompt) + self.decoded


class StepScheduler:
    """Runs the flows of a played run side by side.

    Args:
        page: tokens.
        in_flight: requests at once at most.
        chunk: tokens of one prefill batch.
        retract: chance of a retraction in a decode step.
        sessions_at_once: conversations that have begun and not ended.
    """

    def __init__(
        self,
        eviction: str,
        capacity: int,
        page: int,
        *,
        in_flight: int,
        chunk: int,
        retract: float,
        truncate: bool,
        sessions_at_once: int,
    ) -> None:
        self.driver = CacheDriver(eviction, capacity, page, truncate=truncate)
        self._capacity, self._page, self._in_flight = capacity, page, in_flight
        self._chunk, self._retract, self._sessions = chunk, retract, sessions_at_once
        self._rng = random.Random(7)
        self._steps: list[tuple[float, int, int, int]] = []
        self.retracted = 0
        self.chunked = 0
        self.looks = 0

    def run(self, played: Played) -> tuple[list[int], Records]:
        """Hits by request, and the steps."""
        flows = list(dict.fromkeys((s.record.session, s.record.flow) for s in played.sent))
        todo: list[list[_Job]] = [[] for _ in flows]
        for number, one in enumerate(played.sent):
            flow = flows.index((one.record.session, one.record.flow))
            stop = Stop(int(played.workload.requests["stop"][number]))
            job = _Job(number, conversation_name(*flows[flow]), one.prompt.tolist(), one.output.tolist(), stop)
            todo[flow].append(job)
        ready = dict.fromkeys(range(min(self._sessions, len(flows))), 0.0)
        self._next = len(ready)
        hits = [0] * len(played.sent)
        waiting: list[tuple[int, _Job]] = []
        running: list[tuple[int, _Job]] = []
        partly: tuple[int, _Job] | None = None
        now = 0.0
        while any(todo) or waiting or running or partly:
            now += STEP_S
            for flow, at in list(ready.items()):
                if at <= now:
                    del ready[flow]
                    job = todo[flow].pop(0)
                    self.driver.arrive(str(job.number), job.prompt, job.name, now)
                    self._note(now, ARRIVE, job)
                    waiting.append((flow, job))
            batch = [] if partly is None else [partly]
            left = self._chunk
            ends = {}
            if partly is not None:
                ends[partly[1].number] = min(partly[1].done + left, partly[1].target)
                left -= ends[partly[1].number] - partly[1].done
            while waiting and left >= self._page and len(running) + len(batch) < self._in_flight:
                flow, job = waiting[0]
                found = self.driver.look_up(str(job.number), now)
                self._note(now, MATCH, job, job.target - 1)
                self.looks += 1
                if (running or batch) and not self._fits([*running, *batch, waiting[0]]):
                    break
                del waiting[0]
                job.done = found
                job.hit = found if job.hit is None else job.hit
                until = min(found + left, job.target)
                ends[job.number] = until if until == job.target else until // self._page * self._page
                left -= ends[job.number] - found
                batch.append((flow, job))
            if batch:
                self.driver.prefill([(str(job.number), ends[job.number]) for _, job in batch], now)
                for _, job in batch:
                    self._note(now, PREFILL, job, ends[job.number])
                    job.done = ends[job.number]
                partly = None
                for flow, job in batch:
                    if job.done < job.target:
                        self.chunked += 1
                        assert partly is None
                        partly = (flow, job)
                    elif job.decoded == len(job.answer) - 1:
                        self._finish(flow, job, todo, ready, hits, now)
                        continue
                    else:
                        running.append((flow, job))
                    self.driver.keep(str(job.number), now)
                    self._note(now, KEEP, job, job.done)
                continue
            if not running:
                continue
            if len(running) > 1 and self._rng.random() < self._retract:
                flow, job = running.pop()
                self.driver.release(str(job.number), now)
                self._note(now, RELEASE, job)
                self.retracted += 1
                waiting.append((flow, job))
            self.driver.decode([(str(job.number), job.answer[job.decoded]) for _, job in running], now)
            for _, job in running:
                self._note(now, DECODE, job)
                job.done += 1
                job.decoded += 1
            for flow, job in list(running):
                if job.decoded == len(job.answer) - 1:
                    running.remove((flow, job))
                    self._finish(flow, job, todo, ready, hits, now)
        self.driver.check()
        return hits, np.array(self._steps, dtype=STEP)

    def _finish(self, flow: int, job: _Job, todo: Any, ready: dict[int, float], hits: list[int], now: float) -> None:
        self.driver.finish(str(job.number), job.answer, job.stop, now)
        self._note(now, FINISH, job, job.done)
        hits[job.number] = job.hit or 0
        if todo[flow]:
            ready[flow] = now + self._rng.choice((1.0, 3.0, 30.0))
        else:
            self.driver.end(job.name, now)
            self._steps.append((now, END, flow, 0))
            if self._next < len(todo):
                ready[self._next] = now
                self._next += 1

    @property
    def evicted(self) -> int:
        """Tokens."""
        return self.driver.evicted

    def _fits(self, jobs: Sequence[tuple[int, _Job]]) -> bool:
        pages = sum(-(-(len(job.prompt) + len(job.answer)) // self._page) + 2 for _, job in jobs)
        return pages * self._page <= self._capacity

    def _note(self, now: float, kind: int, job: _Job, tokens: int = 0) -> None:
        self._steps.append((now, kind, job.number, tokens))
