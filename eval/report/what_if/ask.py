"""What another cache would have brought to a run: the simulator on the run's own requests.

Everything but the clock that keeps the time budget is a function of the run. What there was no time for is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from eval.report.schema_what_if import Answer, CurvePoint, WhatIf
from eval.report.text_what_if import UNLIKE
from eval.report.what_if.workload import RunWorkload, workload_of_run
from radix_cache.eviction import eviction_policy
from radix_cache.simulator import FlowSpec, Outcome, Service, Setting, TurnSpec, Workload, WorkloadBuilder, simulate
from radix_cache.simulator.run import UNBOUNDED
from traces.replay.events import KvEvents
from traces.replay.record import RequestRecord, RunHeader

CURVE_POLICIES = ("lru", "gittins", "belady")
OF_LIVE = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # cache sizes, as multiples of the live contexts
OF_OWN = (1.25, 1.5, 2.0)  # and of this run's own
ALIKE = 0.04  # sizes that differ by less are one
SATURATED = 5e-4  # a cache of which no larger one brings more than this

DEFINITION = (
    "Simulated on this run's own requests: sessions in the order in which they began, as many at once, each turn after"
    " the wait and with the duration that it had (a wait in the server's queue counts as the former where the server"
    " tells it). A hit does not shorten a request here, so throughput is not predicted. Gain: points of hit rate"
    " against this run's own setting in the same simulator. Worth: how much more memory under this run's policy brings"
    " as much."
)


class Serving(NamedTuple):
    """What a run's server was, as far as it is known."""

    policy: str = "lru"
    policy_text: str = "lru is assumed"
    whole_nodes: bool = True  # it evicts whole radix nodes, as SGLang's own cache does
    bytes_per_token: float | None = None  # all ranks together


class Question(NamedTuple):
    key: str
    text: str
    setting: Setting


@dataclass(slots=True)
class _Budget:
    seconds: float
    clock: Callable[[], float]
    began: float
    longest: float = 0.0

    def fits(self) -> bool:
        """Whether one more simulation is likely to end in time."""
        return self.clock() - self.began + self.longest <= self.seconds


def what_if(
    header: RunHeader,
    records: Sequence[RequestRecord],
    events: KvEvents | None,
    *,
    page_size: int,
    realized_rate: float | None,
    serving: Serving,
    seconds: float = 10.0,
    more_tokens: Sequence[int] = (),
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    clock: Callable[[], float] = time.process_time,
) -> WhatIf | None:
    """Simulate other caches on a run.

    Args:
        header, records, events: of the run.
        page_size: tokens per page of the cache.
        realized_rate: what the server reported.
        serving: the run's own cache.
        seconds: time for simulations; reading the run and compiling (a minute on first use) come on top.
        more_tokens: amounts of memory to add and ask about, beside a half and the whole of what there was.
        progress: called before each simulation with its name, how many are done, and how many there are.
        clock: in seconds; of this process, so that a busy machine answers as many questions.

    Returns:
        None where no request can be simulated.
    """
    progress("reading the run's requests", 0, 0)
    run = workload_of_run(records, page_size, events)
    if run is None:
        return None
    capacity = header.server.kv_capacity_tokens
    own = Setting(
        policy=serving.policy,
        capacity=capacity or UNBOUNDED,
        sessions=header.concurrency,
        service=Service.FIXED,
        truncate=not serving.whole_nodes,
        spare_pages=1,
    )
    progress("compiling (first use takes a minute)", 0, 0)
    warm_up(own)
    return _Asking(run, own, serving, _Budget(seconds, clock, clock()), progress).ask(
        realized_rate, [] if capacity is None else [*more_tokens, capacity // 2, capacity]
    )


class _Asking:
    def __init__(
        self,
        run: RunWorkload,
        own: Setting,
        serving: Serving,
        budget: _Budget,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._run = run
        self._work: Workload = run.workload
        self._own = own
        self._serving = serving
        self._budget = budget
        self._progress = progress
        self._page = run.workload.page_size
        self._done = 0
        self._total = 0
        self._made: dict[Setting, Outcome] = {}
        self.left_out: list[str] = []

    def ask(self, realized: float | None, more: Sequence[int]) -> WhatIf:
        known = self._own.capacity < UNBOUNDED
        limitless = self._simulate("a cache without bounds", replace(self._own, policy="lru", capacity=UNBOUNDED))
        assert limitless is not None  # the first one always runs
        self._reference = limitless
        live = limitless.mean_context or float(self._largest())  # no moment had all clients busy
        questions = self._questions(more) if known else []
        sizes = self._sizes(live, known)
        policies = list(dict.fromkeys((self._own.policy, *CURVE_POLICIES)))
        self._total = 1 + known + len(questions) + len(sizes) * len(policies)
        base = self._simulate("this run's own setting", self._own) if known else limitless
        outcomes = [(q, self._simulate(q.text, q.setting)) for q in questions]
        curve = self._curve(sizes, policies, live)
        answers = [] if base is None else [self._answer(q, o, base, curve) for q, o in outcomes if o is not None]
        simulated = base.total_rate if base is not None and known else None
        return WhatIf(
            definition=DEFINITION,
            source=self._run.source,
            source_text=self._source_text(),
            requests=len(self._work.requests),
            left_out_requests=self._run.left_out,
            sessions=self._own.sessions,
            policy=self._own.policy,
            policy_text=self._serving.policy_text,
            capacity_tokens=self._own.capacity if known else None,
            bytes_per_token=self._serving.bytes_per_token,
            live_tokens=live,
            theoretical_rate=limitless.total_rate,
            simulated_rate=simulated,
            realized_rate=realized,
            curve=curve,
            answers=answers,
            left_out=self.left_out,
            notes=_notes(simulated, realized, known),
        )

    def _simulate(self, name: str, setting: Setting) -> Outcome | None:
        if setting in self._made:
            return self._made[setting]
        if self._made and not self._budget.fits():
            self.left_out.append(name)
            return None
        self._progress(name, self._done, self._total)
        self._done += 1
        began = self._budget.clock()
        reference = self._reference if self._made and eviction_policy(setting.policy).offline else None
        outcome = simulate(self._work, setting, reference=reference)
        self._budget.longest = max(self._budget.longest, self._budget.clock() - began)
        if self._made:  # only the first one's requests are needed again
            outcome = replace(outcome, fates=outcome.fates[:0].copy(), log=outcome.log[:0].copy())
        self._made[setting] = outcome
        return outcome

    def _questions(self, more: Sequence[int]) -> list[Question]:
        own, size = self._own, self._own.capacity
        other = "gittins" if own.policy.partition(":")[0] != "gittins" else "lru"
        # What is not this run's own cache would be agentserve's, which cuts the last victim.
        cut = replace(own, truncate=True)
        found = [
            Question(f"memory_{extra}", f"{100 * extra / size:.0f} % more memory", replace(own, capacity=size + extra))
            for extra in dict.fromkeys(more)
            if extra > 0
        ]
        return [
            *found,
            Question("policy", f"{other} instead of {own.policy}", replace(cut, policy=other)),
            Question("gate", f"{own.policy} behind gate:0.9", replace(own, admission="gate:0.9")),
            Question("policy_gate", f"{other} behind gate:0.9", replace(cut, policy=other, admission="gate:0.9")),
            Question("parking", f"{other} with parking:1.1", replace(cut, policy=other, admission="parking:1.1")),
            Question("host", "a host tier as large as the device's", replace(own, host_capacity=size)),
            Question("host_policy", f"such a host tier, and {other} in both", replace(
                cut, policy=other, host_policy=other, host_capacity=size)),
            Question("belady", "an order that knows the future (no server does)", replace(cut, policy="belady")),
        ]  # fmt: skip

    def _sizes(self, live: float, known: bool) -> list[int]:
        kept = [self._own.capacity] if known else []
        sizes = [int(part * live) for part in OF_LIVE]
        if known and self._own.capacity < OF_LIVE[-1] * live:
            sizes += [int(part * self._own.capacity) for part in OF_OWN]
        for size in sizes:
            whole = max(size // self._page, 1) * self._page
            if all(abs(whole / other - 1) > ALIKE for other in kept):
                kept.append(whole)
        return sorted(kept)

    def _largest(self) -> int:
        """Tokens of the largest request."""
        return int((self._work.requests["prompt"] + self._work.requests["output"]).max())

    def _curve(self, sizes: Sequence[int], policies: Sequence[str], live: float) -> list[CurvePoint]:
        """From the smallest cache up, and no further than any policy gains."""
        points: list[CurvePoint] = []
        best = self._reference.total_rate
        own = self._own.capacity if self._own.capacity < UNBOUNDED else 0
        for size in sizes:
            rates: dict[str, float | None] = {}
            for policy in policies:
                truncate = self._own.truncate if policy == self._own.policy else True
                setting = replace(self._own, policy=policy, capacity=size, truncate=truncate)
                outcome = self._simulate(f"{policy} with {size / live:.2f} of the live contexts", setting)
                rates[policy] = None if outcome is None else outcome.total_rate
            points.append(CurvePoint(capacity_tokens=size, of_live=size / live, rates=rates))
            reached = [rate for rate in rates.values() if rate is not None]
            if len(reached) == len(policies) and min(reached) >= best - SATURATED and size >= own:
                break
        return points

    def _answer(self, question: Question, outcome: Outcome, base: Outcome, curve: Sequence[CurvePoint]) -> Answer:
        setting, size = question.setting, self._own.capacity
        saved = outcome.hit_tokens + outcome.host_tokens - base.hit_tokens - base.host_tokens
        worth = self._worth(outcome.total_rate, base.total_rate, curve)
        return Answer(
            key=question.key,
            question=question.text,
            policy=setting.policy,
            admission=setting.admission,
            capacity_tokens=setting.capacity,
            host_tokens=setting.host_capacity,
            rate=outcome.total_rate,
            difference=outcome.total_rate - base.total_rate,
            saved_tokens=saved,
            more_bytes=self._bytes(setting.capacity - size + setting.host_capacity),
            worth_tokens=worth,
            worth_bytes=None if worth is None else self._bytes(worth),
            start_wait_s=outcome.start_wait_mean,
            rejected=outcome.rejected,
        )

    def _worth(self, rate: float, base: float, curve: Sequence[CurvePoint]) -> int | None:
        """More memory that brings ``rate`` under this run's policy, between the sizes that were simulated."""
        size = self._own.capacity
        known = {p.capacity_tokens: r for p in curve if (r := p.rates.get(self._own.policy)) is not None}
        known |= {
            s.capacity: o.total_rate for s, o in self._made.items() if s == replace(self._own, capacity=s.capacity)
        }
        larger = sorted((tokens, r) for tokens, r in known.items() if size < tokens < UNBOUNDED)
        if rate <= base:
            return 0
        tokens = [size, *(t for t, _ in larger)]
        rates = np.maximum.accumulate([base, *(r for _, r in larger)])
        if rate > rates[-1]:
            return None
        return int(np.interp(rate, rates, tokens)) - size

    def _bytes(self, tokens: int) -> int | None:
        per_token = self._serving.bytes_per_token
        return None if per_token is None else round(tokens * per_token)

    def _source_text(self) -> str:
        left = f" {self._run.left_out:,} completed requests are not among them." if self._run.left_out else ""
        if self._run.source == "cache events":
            return f"Prompts are the recorded ones, page by page.{left}"
        return (
            "Prompts are rebuilt from the lengths of their shared prefixes: which earlier request a prompt shares its"
            f" prefix with is known only with cache events (serve with --kv-events).{left}"
        )


def _notes(simulated: float | None, realized: float | None, known: bool) -> list[str]:
    notes = []
    if not known:
        notes.append("The server did not report its KV capacity, so this run has no point on the curve.")
    if simulated is not None and realized is not None and abs(simulated - realized) > UNLIKE:
        notes.append(
            f"The simulator gives this run's own setting {100 * simulated:.2f} %, the server reported"
            f" {100 * realized:.2f} %: read the answers as differences, and with care."
        )
    return notes


def warm_up(own: Setting) -> None:
    """Compile what the questions need, so that it is no part of the time budget: a minute on first use, then kept."""
    pages = np.arange(2, dtype=np.int64)
    builder = WorkloadBuilder(1, numbered=2)
    builder.add("warm-up", [FlowSpec([TurnSpec(2, 1, pages, pages[:0], service_s=1.0)])])
    workload = builder.build()
    for policy in dict.fromkeys((own.policy, *CURVE_POLICIES)):
        simulate(workload, replace(own, policy=policy, capacity=64))
    for admission in ("gate:0.9", "parking:1.1"):
        simulate(workload, replace(own, capacity=64, admission=admission, host_capacity=64))
