"""Live attribution: a toy server with known truth, its events joined and batched as SGLang does, then the real one."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentserve.cli.report import command as report_command
from eval.attribution.live import attribute_with_events
from eval.report import load_run, summarize
from radix_cache.attribution import CacheKind, Cause
from tests.servers import TinyServer
from tests.test_report_summary import record
from traces.replay.config import ReplayConfig
from traces.replay.events import EventBatch, EventHeader, Gap, KvEvents, RequestPages, as_ranges
from traces.replay.record import RequestRecord
from traces.replay.run import replay

PAGE = 4


@dataclass
class Toy:
    """A radix cache of whole pages under LRU. Pages are numbers; a prompt is a path of them."""

    capacity: int
    used: dict[int, int] = field(default_factory=dict)  # resident page -> last use
    parent: dict[int, int] = field(default_factory=dict)
    locked: dict[int, int] = field(default_factory=dict)
    clock: int = 0
    joined: list[list[Any]] = field(default_factory=list)  # events since the last batch
    batches: list[EventBatch] = field(default_factory=list)
    gone: dict[int, int] = field(default_factory=dict)  # page -> how often it was evicted

    def match(self, path: list[int]) -> int:
        hit = 0
        while hit < len(path) and path[hit] in self.used:
            hit += 1
        self.clock += 1
        for page in path[:hit]:
            self.used[page] = self.clock
            self.locked[page] = self.locked.get(page, 0) + 1
        return hit

    def unlock(self, path: list[int]) -> None:
        for page in path:
            self.locked[page] -= 1

    def room(self, pages: int) -> bool:
        """Evict until so many pages fit; leaves first, the least recently used first."""
        while self.capacity - len(self.used) < pages:
            parents = {self.parent[p] for p in self.used}
            leaves = [p for p in self.used if p not in parents and not self.locked.get(p)]
            if not leaves:
                return False
            victim = min(leaves, key=lambda p: (self.used[p], -p))
            del self.used[victim]
            self.gone[victim] = self.gone.get(victim, 0) + 1
            self._event("remove", victim)
        return True

    def store(self, path: list[int]) -> None:
        self.clock += 1
        above = -1
        for page in path:
            if page not in self.used:
                self._event("store", page)
                self.parent[page] = above
            self.used[page] = self.clock
            above = page

    def publish(self, now: float) -> None:
        if self.joined:
            ops = tuple((kind, 1, tuple(as_ranges(pages))) for kind, pages in self.joined)
            self.batches.append(EventBatch(seq=len(self.batches), ts=now, at=now, ops=ops))
            self.joined.clear()

    def _event(self, kind: str, page: int) -> None:
        # SGLang joins removals, and stores that continue each other.
        if self.joined and self.joined[-1][0] == kind:
            self.joined[-1][1].append(page)
        else:
            self.joined.append([kind, [page]])


@st.composite
def sessions(draw: st.DrawFn) -> list[list[tuple[list[int], list[int]]]]:
    """Conversations as (prompt, answer) paths; they share a head of two pages, and sometimes go back."""
    fresh = 2
    made = []
    for _ in range(draw(st.integers(2, 4))):
        path, turns = [0, 1][: draw(st.integers(0, 2))], []
        for _ in range(draw(st.integers(1, 5))):
            if draw(st.integers(0, 4)) == 0:
                path = path[: draw(st.integers(0, len(path)))]
            more, out = draw(st.integers(1, 4)), draw(st.integers(0, 2))
            path = [*path, *range(fresh, fresh + more)]
            answer = list(range(fresh + more, fresh + more + out))
            fresh += more + out
            turns.append((path, answer))
            path = [*path, *answer]
        made.append(turns)
    return made


def play(
    work: list[list[tuple[list[int], list[int]]]], capacity: int, order: random.Random
) -> tuple[list[RequestRecord], KvEvents, dict[tuple[str, str, int], int]]:
    """Run the toy with sessions side by side; also returns how many pages of each prompt had been evicted."""
    toy = Toy(capacity)
    state = [("due", 0)] * len(work)
    seen: set[int] = set()
    held: dict[int, list[int]] = {}
    facts: dict[int, dict[str, Any]] = {}
    records, paths, lost = [], {}, {}
    now = 0.0
    while any(step != "over" for step, _ in state):
        now += 1.0
        at = order.choice([i for i, (step, _) in enumerate(state) if step != "over"])
        step, turn = state[at]
        path, answer = work[at][turn]
        if step == "due":
            known = 0
            while known < len(path) and path[known] in seen:
                known += 1
            facts[at] = {"sent_s": now, "lcp": known * PAGE}
            seen.update(path)
            state[at] = ("waiting", turn)
        elif step == "waiting":
            hit = toy.match(path[: (len(path) * PAGE) // PAGE])
            need = len(path) + len(answer) - hit
            if not toy.room(need):
                toy.unlock(path[:hit])
                assert held  # alone, every request fits
                now += 1
                state[at] = ("waiting", turn)
                toy.publish(now)
                other = next(iter(held))
                _finish(toy, other, work, state, held, facts, records, paths, seen, now)
                continue
            best = facts[at]["lcp"] // PAGE
            lost[f"s{at}", "main", turn] = sum(toy.gone.get(p, 0) > 0 for p in path[hit:best])
            facts[at] |= {"hit": hit * PAGE, "matched": hit}
            # Memory for the answer is held from here on, as pages that nobody can hit.
            toy.capacity -= len(answer)
            toy.store(path)
            for page in path[hit:]:
                toy.locked[page] = toy.locked.get(page, 0) + 1
            held[at] = path
            if order.random() < 0.5:
                toy.publish(now + 0.5)
            facts[at]["first_token_s"] = now + 0.6
            state[at] = ("running", turn)
        else:
            _finish(toy, at, work, state, held, facts, records, paths, seen, now)
        if order.random() < 0.5:
            toy.publish(now + 0.8)
    toy.publish(now + 1)
    return records, KvEvents(_header(), toy.batches, paths), lost


def _header() -> EventHeader:
    return EventHeader(header=1, endpoint="tcp://x:1", page_size=PAGE, pair_keys=False, emptied=True)


def _finish(
    toy: Toy,
    at: int,
    work: list[list[tuple[list[int], list[int]]]],
    state: list[tuple[str, int]],
    held: dict[int, list[int]],
    facts: dict[int, dict[str, Any]],
    records: list[RequestRecord],
    paths: dict[tuple[str, str, int], RequestPages],
    seen: set[int],
    now: float,
) -> None:
    turn = state[at][1]
    path, answer = work[at][turn]
    toy.capacity += len(answer)
    toy.store([*path, *answer])
    toy.unlock(held.pop(at))
    seen.update(answer)
    fact = facts.pop(at)
    prompt = len(path) * PAGE + 1  # so that all pages of the path may hit
    records.append(
        record(
            f"s{at}", turn, prompt, fact["lcp"], cached_tokens=fact["hit"], sent_s=fact["sent_s"],
            first_token_s=fact["first_token_s"], done_s=now, recorded_stop="tool_use",
        )
    )  # fmt: skip
    paths[f"s{at}", "main", turn] = RequestPages(
        session=f"s{at}", flow="main", turn=turn, prompt=tuple(as_ranges(path)), answer=tuple(as_ranges(answer))
    )
    state[at] = ("due", turn + 1) if turn + 1 < len(work[at]) else ("over", turn)


@given(sessions(), st.integers(0, 5), st.integers(0, 1_000_000))
@settings(max_examples=150, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_toy_server_leaves_nothing_unexplained(
    work: list[list[tuple[list[int], list[int]]]], spare: int, seed: int
) -> None:
    capacity = spare + max(len(path) + len(answer) for turns in work for path, answer in turns)
    records, events, lost = play(work, capacity, random.Random(seed))
    found = attribute_with_events(records, records, events, CacheKind(PAGE))
    for one, request in zip(found, records, strict=True):
        causes = {cause: sum(loss.tokens for loss in one.losses if loss.cause is cause) for cause in Cause}
        assert causes[Cause.UNEXPLAINED] == 0, (request, one)
        evicted = lost[request.session, request.flow, request.turn] * PAGE
        assert causes[Cause.EVICTED] == evicted
        # prompts have whole pages and one token more, so nothing else can be lost
        assert causes[Cause.IN_FLIGHT] + causes[Cause.OVERTAKEN] == one.gap - evicted
        assert causes[Cause.OVERTAKEN] <= 0 <= causes[Cause.IN_FLIGHT]


@given(sessions(), st.integers(0, 5), st.integers(0, 1_000_000))
@settings(max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_lost_batches_make_no_false_causes(
    work: list[list[tuple[list[int], list[int]]]], spare: int, seed: int
) -> None:
    """Without some of the evidence a cause may be missing, but none is made up: this cache refuses nothing."""
    capacity = spare + max(len(path) + len(answer) for turns in work for path, answer in turns)
    random_ = random.Random(seed)
    records, events, lost = play(work, capacity, random_)
    at = 1 + random_.randrange(len(events.batches))  # the first one is the server's word that it is empty
    cut = KvEvents(events.header, events.batches[:at] + events.batches[at + 2 :], events.paths, [Gap(0.0, 2, "lost")])
    for one, request in zip(attribute_with_events(records, records, cut, CacheKind(PAGE)), records, strict=True):
        causes = {loss.cause for loss in one.losses}
        assert sum(loss.tokens for loss in one.losses) == one.gap
        assert causes <= {Cause.EVICTED, Cause.IN_FLIGHT, Cause.OVERTAKEN, Cause.UNEXPLAINED}
        evicted = sum(loss.tokens for loss in one.losses if loss.cause is Cause.EVICTED)
        assert evicted <= lost[request.session, request.flow, request.turn] * PAGE


@pytest.mark.server
def test_evictions_on_the_real_server_are_explained(small_server: TinyServer, tmp_path: Path) -> None:
    """A cache of 32 pages under four sessions: most of the gap is evicted, and nothing is unexplained.

    How much is evicted hangs on how the sessions meet. Seen: 15,488 to 19,200 tokens beside 4,892 of page alignment.
    """
    config = ReplayConfig(
        trace="generated:preset=tiny,sessions=8,seed=5", out=tmp_path / "run", url=small_server.url,
        think="none", concurrency=4, max_turns=8, max_output=4,
    )  # fmt: skip
    assert replay(config).status == "finished"
    run = load_run(tmp_path / "run")
    assert run.kv_events is not None
    assert run.kv_events.header.emptied
    assert run.kv_events.gaps == []
    why = summarize(run.header, run.records, run.events, kv_events=run.kv_events).attribution
    assert why is not None
    assert why.evidence.kind == "events"
    causes = {row.cause: row.tokens for row in why.causes}
    assert sum(causes.values()) == why.gap_tokens
    assert causes["evicted"] > why.gap_tokens / 2
    assert why.unexplained_fraction < 0.001
    assert sum(row.tokens for row in why.evictions) == causes["evicted"]
    said = CliRunner().invoke(report_command, [str(tmp_path / "run"), "--no-html"])
    assert said.exit_code == 0, said.output
    assert "Evictions that cost a hit" in said.output
    # the same run without its events: the same gap, and what cannot be told apart is labelled
    bare = summarize(run.header, run.records, run.events).attribution
    assert bare is not None
    assert (bare.gap_tokens, bare.evidence.kind) == (why.gap_tokens, "none")
    assert "not_observed" in {row.cause for row in bare.causes}
