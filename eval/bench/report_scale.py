"""How long a report of many requests takes, on a run that the simulator played: ``python -m eval.bench.report_scale``.

The run is written as a replay writes it, cache events included, and ``agentserve report`` reads it in a process of its
own. Beside the times stands whether the report is right: its causes must be those that the simulator knows.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from eval.bench.simulator_workload import workload_from_sessions
from radix_cache.attribution import Attribution
from radix_cache.attribution.simulated import Replayed, explain
from radix_cache.features import Stop
from radix_cache.simulator import Setting, simulate
from radix_cache.simulator.run import Outcome
from radix_cache.simulator.workload import Workload
from traces.model import MAIN_FLOW
from traces.readers import open_trace
from traces.replay.events import KV_EVENTS, EventBatch, EventHeader, KvEvents, RequestPages
from traces.replay.record import RequestRecord, RunEvent, RunHeader, ServerInfo
from traces.replay.store import EVENTS, HEADER, REQUESTS

LIMIT_S, LIMIT_BYTES = 60, 10**9

_STOPS = {Stop.TOOL: "tool_use", Stop.TURN: "end_turn"}


# The child tells its own peak: what the system reports of a child counts its parent's memory before the exec.
_REPORT = (
    "import sys; from agentserve.cli import main; main(standalone_mode=False); "
    "sys.stderr.write(open('/proc/self/status').read())"
)

Op = tuple[Literal["store", "remove"], int, tuple[tuple[int, int], ...]] | tuple[Literal["clear"]]


def as_run(
    workload: Workload, outcome: Outcome, found: list[Attribution], *, seconds: bool = False
) -> tuple[RunHeader, list[RequestRecord], KvEvents]:
    """A simulated run as a recorded one.

    Args:
        workload: what was played.
        outcome: of ``simulate(..., log_evictions=True)``, without a host tier.
        found: of ``explain``; theory is taken from it.
        seconds: with the simulator's times; else its clock is the count of events. In both nothing happens at once.
    """
    clock = _Clock(outcome, seconds)
    pages = Replayed(workload, outcome)
    flows, sessions, fates = workload.flows, workload.sessions, outcome.fates
    records: list[RequestRecord] = []
    paths: dict[tuple[str, str, int], RequestPages] = {}
    steps: list[tuple[float, list[Op]]] = []
    for number, request in enumerate(workload.requests):
        flow, fate = int(request["flow"]), fates[number]
        session = int(flows[flow]["session"])
        name = MAIN_FLOW if flow == sessions[session]["first_flow"] else f"agent_{flow}"
        key = (workload.session_ids[session], name, number - int(flows[flow]["first"]))
        ready, start, done = clock.at(fate, "ready"), clock.at(fate, "start"), clock.at(fate, "done")
        first_token = max(float(fate["first_token"]), start + 0.6 * clock.step) if seconds else start + 0.6
        best = found[number].aligned
        records.append(
            RequestRecord(
                session=key[0], flow=key[1], turn=key[2], ready_s=ready, sent_s=ready,
                first_token_s=min(first_token, done), done_s=done, think_s=_waited(workload, outcome, number, clock),
                queued_s=start - ready if seconds else None,
                prompt_tokens=int(request["prompt"]), prompt_tokens_reported=int(request["prompt"]),
                output_tokens_wanted=max(1, int(request["output"])), output_tokens=max(1, int(request["output"])),
                cached_tokens=int(fate["hit"]), session_lcp=best, session_output_lcp=best, shared_lcp=best,
                shared_output_lcp=best, ready_lcp=best, recorded_stop=_STOPS.get(Stop(int(request["stop"])), ""),
            )
        )  # fmt: skip
        prompt, answer = pages.paths(number)
        paths[key] = RequestPages(
            session=key[0], flow=key[1], turn=key[2], prompt=_pairs(prompt), answer=_pairs(answer)
        )
        ops: list[Op] = [*pages.evictions(number), ("store", 1, _pairs(prompt))]
        steps.append((start, ops))
        if len(answer) and outcome.setting.insert_output:
            steps.append((done, [("store", 1, _pairs(answer))]))
    batches = [
        EventBatch(seq=seq, ts=at + clock.step / 2, at=at + clock.step / 2, ops=tuple(ops))
        for seq, (at, ops) in enumerate(sorted(steps, key=lambda step: step[0]))
    ]
    header = EventHeader(header=1, endpoint="simulator", page_size=workload.page_size, pair_keys=False, emptied=True)
    return _header(workload, outcome), sorted(records, key=lambda r: r.done_s), KvEvents(header, batches, paths)


class _Clock:
    """Times of the simulator's stamps, no two the same and ``step`` or more apart."""

    def __init__(self, outcome: Outcome, seconds: bool) -> None:
        self.step = 1e-6 if seconds else 1.0
        self._times: dict[int, float] | None = None
        if seconds:
            fates: Any = outcome.fates
            kinds = ("ready", "start", "done")
            stamps = np.concatenate([fates[f"{kind}_stamp"] for kind in kinds])
            times = np.concatenate([fates[kind] for kind in kinds])
            order = np.argsort(stamps, kind="stable")
            later = np.maximum.accumulate(times[order]) + self.step * np.arange(len(order))
            self._times = dict(zip(stamps[order].tolist(), later.tolist(), strict=True))

    def at(self, fate: Any, kind: Literal["ready", "start", "done"]) -> float:
        stamp = int(fate[f"{kind}_stamp"])
        return float(stamp) if self._times is None else self._times[stamp]


def _waited(workload: Workload, outcome: Outcome, number: int, clock: _Clock) -> float:
    """From the end of the request that this one follows to its being ready; 0 for a session's first."""
    flow: Any = workload.flows[int(workload.requests[number]["flow"])]
    before = number - 1 if number != int(flow["first"]) else int(flow["spawn"])
    if before < 0:
        return 0.0
    return clock.at(outcome.fates[number], "ready") - clock.at(outcome.fates[before], "done")


def _pairs(ranges: Any) -> tuple[tuple[int, int], ...]:
    return tuple((first, count) for first, count in ranges.tolist())


def _header(workload: Workload, outcome: Outcome) -> RunHeader:
    page = workload.page_size
    server = ServerInfo(
        base_url="simulator", client="sglang", page_size=page, kv_capacity_tokens=outcome.setting.capacity
    )
    return RunHeader(
        agentserve_version="-", run_id="simulated", started_unix=0.0, trace="-", trace_sha256="0" * 64,
        trace_format="-", sessions=len(workload.sessions), requests=len(workload.requests), tokens_per_block=page,
        recorded_block_size=page, prefix_sharing="session", history="recorded", concurrency=outcome.setting.sessions,
        think={}, over_limit="end-flow", seed=0, server=server,
    )  # fmt: skip


def write_run(folder: Path, header: RunHeader, records: list[RequestRecord], events: KvEvents) -> None:
    """Write a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / HEADER).write_text(header.model_dump_json())
    with (folder / REQUESTS).open("w") as file:
        file.writelines(r.model_dump_json() + "\n" for r in records)
    ends = [RunEvent(at_s=0.0, kind="started"), RunEvent(at_s=records[-1].done_s, kind="finished")]
    (folder / EVENTS).write_text("".join(e.model_dump_json() + "\n" for e in ends))
    with (folder / KV_EVENTS).open("w") as file:
        file.write(events.header.model_dump_json() + "\n")
        file.writelines(b.model_dump_json() + "\n" for b in events.batches)
        file.writelines(p.model_dump_json() + "\n" for p in events.paths.values())


@click.command()
@click.option("--requests", default=50_000, show_default=True, help="At least so many.")
@click.option("--page-size", default=64, show_default=True)
@click.option("--clients", default=28, show_default=True)
@click.option("--capacity", default=1.0, show_default=True, help="Times the mean of the live contexts.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result to this file.")
def main(requests: int, page_size: int, clients: int, capacity: float, out: Path | None) -> None:
    """Time `agentserve report` on a generated run with cache events, and check its causes against the simulator's."""
    sessions: list[Any] = []
    count = 0
    for session in open_trace(f"generated:sessions={requests},seed=0"):
        sessions.append(session)
        count += session.request_count
        if count >= requests:
            break
    workload = workload_from_sessions(sessions, page_size=page_size)
    unbounded = simulate(workload, Setting(sessions=clients))
    setting = Setting(sessions=clients, capacity=int(capacity * unbounded.mean_context))
    outcome = simulate(workload, setting, log_evictions=True)
    found = explain(workload, outcome)
    truth = Counter[str]()
    for one in found:
        for loss in one.losses:
            truth[loss.cause.value] += loss.tokens
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        write_run(run, *as_run(workload, outcome, found))
        began = time.monotonic()
        arguments = ["report", str(run), "--json", "-", "--md", str(run / "report.md")]
        made = subprocess.run([sys.executable, "-c", _REPORT, *arguments], capture_output=True, check=True)
        seconds = time.monotonic() - began
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak_kb = int(made.stderr.decode().rsplit("VmHWM:", 1)[1].split()[0])
        report = json.loads(made.stdout)
        why, what_if = report["attribution"], report["what_if"]
        page = (run / "report.html").stat().st_size
    reported = {row["cause"]: row["tokens"] for row in why["causes"] if row["tokens"]}
    same = reported == {cause: n for cause, n in truth.items() if n}
    result = {
        "command": f"python -m eval.bench.report_scale --requests {requests}",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),  # others' work makes seconds longer, and hardly cpu_seconds
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "batches": why["evidence"]["batches"],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mb": round(peak_kb / 1024),
        "html_mb": round(page / 1e6, 2),
        "within_60_s_and_1_gb": seconds < LIMIT_S and peak_kb * 1024 < LIMIT_BYTES,
        "hit_rate": round(outcome.rate, 4),
        "causes": reported,
        "same_causes_as_simulator": same,
        "unexplained_tokens": why["unexplained_tokens"],
        "what_if": {
            "simulations": len(what_if["answers"]) + sum(len(point["rates"]) for point in what_if["curve"]),
            "left_out": len(what_if["left_out"]),
            "hit_rate_of_this_run": round(what_if["simulated_rate"], 4),
            "answers": {a["question"]: round(a["difference"], 4) for a in what_if["answers"]},
        },
    }
    text = json.dumps(result, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    if not same:
        raise click.ClickException("the report's causes are not those of the simulator")


if __name__ == "__main__":
    main()
