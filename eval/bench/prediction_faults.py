"""What wrong session ids, missing ends, missing stop reasons and a bad clock cost: the live cache, driven in memory.

    python -m eval.bench.prediction_faults [TRACE]

Sessions of a trace run in a closed loop in simulated time; every request goes through SGLang's cache with our policy,
session table and tree, as a server would build them. No model runs, so a row takes seconds.
"""

from __future__ import annotations

import heapq
import json
import random
import tracemalloc
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from agentserve.runtime.policy_sessions import SessionTable
from eval.bench.prediction_live import expected_contexts
from eval.bench.prediction_workload import STOPS
from eval.bench.sglang_cache_driver import CacheDriver
from radix_cache.features import Stop
from radix_cache.gaps import GapTable
from traces import open_trace
from traces.model import Session
from traces.replay.clients.base import conversation_name
from traces.replay.schedule import Think, recorded_think_s, spawning_turn
from traces.replay.select import Limits, select
from traces.tokens import TokenBook

PAGE = 128
SERVICE_S = 2.0
VOCAB = (100, 20_000)


@dataclass(frozen=True)
class Request:
    """One request with its times in seconds; ``answer`` is as long as the trace says, its tokens are made up."""

    session: str
    flow: str
    prompt: list[int]
    answer: list[int]
    stop: Stop
    start_s: float
    done_s: float
    last: bool

    @property
    def stop_reason(self) -> str:
        """As a trace writes it."""
        return next(name for name, stop in STOPS.items() if stop == self.stop)


@dataclass(frozen=True)
class Faults:
    """Shares are 0..1 of what could go wrong; ``clock`` turns true seconds into those that the server sees."""

    name: str
    unnamed: bool = False
    wrong_id: float = 0.0
    end_lost: float = 0.0
    stop_lost: float = 0.0
    clock: Callable[[float], float] = lambda now: now


@dataclass(frozen=True)
class Row:
    faults: str
    rate: float  # 0..1 of prompt tokens
    points: float  # against no fault
    refused: int  # requests for which no memory was left
    flows_known: int


FAULTS = (
    Faults("none"),
    Faults("no ids: all inferred", unnamed=True),
    Faults("no ids, no ends", unnamed=True, end_lost=1.0),
    Faults("1 % of requests under another session's id", wrong_id=0.01),
    Faults("10 % of requests under another session's id", wrong_id=0.10),
    Faults("50 % of ends lost", end_lost=0.5),
    Faults("all ends lost", end_lost=1.0),
    Faults("all stop reasons lost", stop_lost=1.0),
    Faults("clock set back 1 h in the middle", clock=lambda now: now if now < 600 else now - 3600),
    Faults("clock set ahead 1 h in the middle", clock=lambda now: now if now < 600 else now + 3600),
    Faults("clock runs 10 % fast", clock=lambda now: 1.1 * now),
    Faults("clock in steps of 5 s", clock=lambda now: now // 5 * 5),
)


def timed_requests(sessions: Sequence[Session], clients: int, think: Think, seed: int = 0) -> list[Request]:
    """Sessions in a closed loop: each client plays one after the other, a request takes ``SERVICE_S``."""
    rng = random.Random(seed)
    free = [0.0] * clients
    requests = []
    for session in sessions:
        begin = heapq.heappop(free)
        book = TokenBook(session, seed=seed, vocab=VOCAB, prefix_sharing="session", history="recorded")
        main_done: list[float] = []
        latest = begin
        for flow in session.flows():
            spawner = spawning_turn(session, flow)
            done = begin if spawner is None else main_done[spawner]
            for position, turn in enumerate(flow.turns):
                start = done + think.wait_s(recorded_think_s(session, flow, position))
                done = start + SERVICE_S
                answer = [rng.randrange(*VOCAB) for _ in range(max(1, turn.output_tokens))]
                prompt, stop = book.prompt(flow.name, position).tolist(), STOPS[turn.stop.value]
                last = position + 1 == len(flow.turns)
                requests.append(Request(session.id, flow.name, prompt, answer, stop, start, done, last))
                if flow is session.main:
                    main_done.append(done)
            latest = max(latest, done)
        heapq.heappush(free, latest)
    return requests


def drive(
    requests: Sequence[Request], faults: Faults, eviction: str, capacity: int, seed: int = 0
) -> tuple[float, CacheDriver]:
    """Hit rate (0..1 of prompt tokens), and the driver that is left, checked for lost memory."""
    rng = random.Random(seed)
    driver = CacheDriver(eviction, capacity, PAGE)
    steps = [(r.start_s, 1, n) for n, r in enumerate(requests)] + [(r.done_s, 0, n) for n, r in enumerate(requests)]
    names = [conversation_name(r.session, r.flow) for r in requests]
    hits = 0
    running: list[int] = []
    for at_s, begins, number in sorted(steps):
        now, request, rid = faults.clock(at_s), requests[number], str(number)
        if not begins:
            stop = Stop.UNKNOWN if rng.random() < faults.stop_lost else request.stop
            driver.finish(rid, request.answer, stop, now)
            if request.last and rng.random() >= faults.end_lost:
                driver.end(names[number], now)
            continue
        wrong = rng.random() < faults.wrong_id
        running = [n for n in (*running, number) if requests[n].done_s > at_s]
        name = names[rng.choice(running)] if wrong else names[number]
        driver.arrive(rid, request.prompt, None if faults.unnamed else name, now)
        tokens = len(request.prompt) + len(request.answer) - 1
        hits += driver.start(rid, now, -(-tokens // PAGE) + 1) or 0
    driver.check()
    return hits / sum(len(r.prompt) for r in requests), driver


def measure(requests: Sequence[Request], capacity: int, eviction: str, faults: Iterable[Faults] = FAULTS) -> list[Row]:
    rows: list[Row] = []
    for fault in faults:
        rate, driver = drive(requests, fault, eviction, capacity)
        points = 100 * (rate - (rows[0].rate if rows else rate))
        rows.append(Row(fault.name, rate, points, driver.refused, len(driver.cache.table)))
    return rows


def table_growth(ids: int, limit: int = 4096) -> tuple[int, int]:
    """Flows kept, and bytes held, after ``ids`` sessions that never end, in a table of ``limit`` flows."""
    table = SessionTable(GapTable(), PAGE, limit=limit)
    rng = np.random.default_rng(0)
    tracemalloc.start()
    for number in range(ids):
        prompt = array("q", rng.integers(*VOCAB, 2 * PAGE).tobytes())
        flow = table.arrive(str(number), prompt, f"session-{number}", float(number))
        table.finish(flow, str(number), Stop.TOOL, len(prompt), float(number))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return len(table), held


@click.command(context_settings={"show_default": True})
@click.argument("trace", default="generated:preset=tiny,sessions=60,seed=3")
@click.option("--sessions", type=int)
@click.option("--clients", default=12)
@click.option("--tokens-per-block", type=int)
@click.option("--max-context", default=6000)
@click.option("--think", default="capped:60")
@click.option("--capacity", "ratio", default=1.0, help="Memory over the mean of the live contexts.")
@click.option("--policy", default="gittins")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result here too.")
def main(
    trace: str,
    sessions: int | None,
    clients: int,
    tokens_per_block: int | None,
    max_context: int,
    think: str,
    ratio: float,
    policy: str,
    json_path: Path | None,
) -> None:
    """Print the table of faults, and what 4,096 and 40,000 sessions without an end leave in memory."""
    limits = Limits(sessions=sessions, tokens_per_block=tokens_per_block, max_context=max_context)
    chosen = select(open_trace(trace), limits).sessions
    thinking = Think.parse(think)
    capacity = int(ratio * expected_contexts(chosen, clients, thinking, SERVICE_S))
    requests = timed_requests(chosen, clients, thinking)
    rows = measure(requests, capacity, policy)
    lru, _ = drive(requests, FAULTS[0], "lru", capacity)
    growth = {ids: table_growth(ids) for ids in (4096, 40_000)}
    shown = Table(
        title=f"{policy}, {len(requests)} requests, {capacity:,} tokens; lru without faults {100 * lru:.2f} %"
    )
    for column in ("fault", "hit rate %", "points", "refused", "flows known"):
        shown.add_column(column, justify="left" if column == "fault" else "right")
    for row in rows:
        shown.add_row(row.faults, f"{100 * row.rate:.2f}", f"{row.points:+.2f}", str(row.refused), str(row.flows_known))
    Console(width=120).print(shown)
    for ids, (flows, held) in growth.items():
        click.echo(f"{ids:,} sessions that never end: {flows:,} flows kept, {held / 1e6:.1f} MB")
    if json_path is not None:
        result = {
            "policy": policy, "requests": len(requests), "capacity_tokens": capacity, "lru_rate": lru,
            "rows": [vars(row) for row in rows],
            "sessions_without_end": {ids: {"flows": f, "bytes": b} for ids, (f, b) in growth.items()},
        }  # fmt: skip
        json_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
