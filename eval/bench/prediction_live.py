"""Live runs on the tiny M3, one server after the other, each with the same trace and the same memory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agentserve.launch.tiny import tiny_server
from agentserve.runtime.policy_journal import JOURNAL_VARIABLE, JournalEvent, read_journal
from radix_cache.rates import hit_tokens
from traces import open_trace
from traces.model import Session
from traces.replay.config import ReplayConfig
from traces.replay.rebuild import Sent, sent_requests
from traces.replay.record import RequestRecord
from traces.replay.run import replay, replayed_sessions
from traces.replay.schedule import Think, recorded_think_s
from traces.replay.select import select
from traces.replay.store import Run, read_run

SGLANG = "sglang"  # SGLang's own lru, nothing of ours


@dataclass(frozen=True)
class Policy:
    """What a server runs: ``EVICTION[+ADMISSION]``, or ``sglang`` for SGLang's own lru."""

    eviction: str
    admission: str = "none"

    @classmethod
    def parse(cls, text: str) -> Policy:
        eviction, _, admission = text.partition("+")
        return cls(eviction, admission or "none")

    @property
    def name(self) -> str:
        return self.eviction if self.admission == "none" else f"{self.eviction}+{self.admission}"

    @property
    def ours(self) -> bool:
        return self.eviction != SGLANG


@dataclass(frozen=True)
class LiveRun:
    """What a run left behind."""

    policy: Policy
    run: Run
    records: list[RequestRecord]
    sent: list[Sent]
    journal: list[JournalEvent] | None  # None: the server wrote none
    evicted: int  # tokens
    retracted: int  # times a running request gave its memory back

    @property
    def page_size(self) -> int:
        return self.run.header.server.page_size or 1

    @property
    def capacity(self) -> int:
        """Tokens, as the server reports it."""
        capacity = self.run.header.server.kv_capacity_tokens
        if capacity is None:
            raise ValueError(f"{self.run.path}/run.json: the server did not tell its capacity")
        return capacity

    @property
    def rate(self) -> float:
        """Realized rate, 0..1 of prompt tokens."""
        return sum(r.cached_tokens or 0 for r in self.records) / sum(r.prompt_tokens for r in self.records)

    @property
    def theoretical(self) -> float:
        """What a cache that never evicts hits at the server's page size, 0..1."""
        hits = sum(hit_tokens(r.shared_output_lcp, r.prompt_tokens, self.page_size) for r in self.records)
        return hits / sum(r.prompt_tokens for r in self.records)

    def answers(self) -> dict[tuple[str, str, int], str | None]:
        return {(r.session, r.flow, r.turn): r.output_sha256 for r in self.records}


def live_run(policy: Policy, settings: ReplayConfig, *, capacity: int, checkpoint: Path) -> LiveRun:
    """Start a server, replay into ``settings.out``, stop the server. A run that is there already is only read; one
    that was stopped on the way is played again from its start, since its server had gone with it.

    Raises:
        RuntimeError: the replay did not finish, or a request failed.
    """
    out = settings.out
    if _counters(out).exists():
        return load(policy, out)
    if out.exists():
        shutil.rmtree(out)
    journal_of(out).unlink(missing_ok=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    overrides: dict[str, Any] = {"kv.capacity_tokens": capacity, "prefill_chunk": 2048}
    if policy.ours:
        overrides |= {"radix.policy": policy.eviction, "radix.admission": policy.admission}
        overrides["env"] = {JOURNAL_VARIABLE: str(journal_of(out).resolve())}
    with tiny_server(overrides, checkpoint=checkpoint, log=out.parent / f"{out.name}.log") as server:
        return record(policy, settings.model_copy(update={"url": server.plan.url}))


def record(policy: Policy, settings: ReplayConfig) -> LiveRun:
    """Replay into ``settings.out`` against a server that runs ``policy``. Its journal, if it is to write one, is at
    ``journal_of(settings.out)``.

    Raises:
        RuntimeError: the replay did not finish, or a request failed.
    """
    before = _counted(settings.url)
    result = replay(settings, handle_signals=False)
    if result.status != "finished" or result.tally.failed:
        raise RuntimeError(f"{policy.name}: {result.status}, {result.tally.failed} failed requests; see {settings.out}")
    counters = {name: value - before[name] for name, value in _counted(settings.url).items()}
    _counters(settings.out).write_text(json.dumps(counters) + "\n")
    return load(policy, settings.out)


def _counted(url: str) -> dict[str, int]:
    metrics = httpx.get(f"{url}/metrics", timeout=30).text
    return {"evicted": _total(metrics, "evicted_tokens"), "retracted": _total(metrics, "num_retracted_requests")}


def journal_of(out: Path) -> Path:
    """Where the server of a run writes what its policies saw."""
    return out.parent / f"{out.name}.journal"


def _counters(out: Path) -> Path:
    """What the server had counted at the end of a run; it is there when the run is whole."""
    return out.parent / f"{out.name}.counters.json"


def load(policy: Policy, out: Path) -> LiveRun:
    """A run that ``live_run`` left."""
    run = read_run(out)
    counters = json.loads(_counters(out).read_text())
    records = list(run.records())
    sent = sent_requests(run.header, replayed_sessions(run), records, run.outputs())
    journal = journal_of(out)
    events = list(read_journal(journal)) if journal.exists() else None
    return LiveRun(policy, run, records, sent, events, counters["evicted"], counters["retracted"])


def _total(metrics: str, name: str) -> int:
    found = re.findall(rf"^sglang:{name}(?:_total)?(?:\{{[^}}]*\}})? (\S+)$", metrics, re.MULTILINE)
    return int(sum(float(value) for value in found))


def contexts_of(config: ReplayConfig) -> float:
    """Mean sum of the live contexts that a replay will have, in tokens, before it is run."""
    sessions = select(open_trace(config.trace), config.limits(config.max_context)).sessions
    return expected_contexts(sessions, config.concurrency, config.thinking, service_s=0.5)


def expected_contexts(sessions: Iterable[Session], concurrency: int, think: Think, service_s: float) -> float:
    """Mean sum of live contexts in tokens, before a run: clients are always busy, a request takes ``service_s``."""
    area = duration = 0.0
    for session in sessions:
        for flow in session.flows():
            waits = [think.wait_s(recorded_think_s(session, flow, k)) + service_s for k in range(len(flow.turns))]
            area += sum(
                (turn.prompt_tokens + turn.output_tokens) * wait for turn, wait in zip(flow.turns, waits, strict=True)
            )
            duration += sum(waits) if flow is session.main else 0.0
    return concurrency * area / duration


def measured_contexts(records: Sequence[RequestRecord], concurrency: int) -> float:
    """The same from a run: a context counts from its request until the next one of its flow is sent, or it ends."""
    flows: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in sorted(records, key=lambda r: r.sent_s):
        flows.setdefault((record.session, record.flow), []).append(record)
    area = 0.0
    spans: dict[str, tuple[float, float]] = {}
    for (session, _), turns in flows.items():
        ends = [turn.sent_s for turn in turns[1:]] + [turns[-1].done_s]
        area += sum((r.prompt_tokens + r.output_tokens) * (end - r.sent_s) for r, end in zip(turns, ends, strict=True))
        first, last = spans.get(session, (turns[0].sent_s, turns[-1].done_s))
        spans[session] = (min(first, turns[0].sent_s), max(last, turns[-1].done_s))
    return concurrency * area / sum(last - first for first, last in spans.values())
