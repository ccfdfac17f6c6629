"""How long a report of many requests takes, on a run that the simulator played: ``python -m eval.bench.report_scale``.

The run is written as a replay writes it, cache events included, and ``agentserve report`` reads it in a process of its
own. Beside the times stands whether the report is right: its causes must be those that the simulator knows.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import click

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

_STOPS = {Stop.TOOL: "tool_use", Stop.TURN: "end_turn"}


# The child tells its own peak: what the system reports of a child counts its parent's memory before the exec.
_REPORT = (
    "import sys; from agentserve.cli import main; main(standalone_mode=False); "
    "sys.stderr.write(open('/proc/self/status').read())"
)

Op = tuple[Literal["store", "remove"], int, tuple[tuple[int, int], ...]] | tuple[Literal["clear"]]


def as_run(
    workload: Workload, outcome: Outcome, found: list[Attribution]
) -> tuple[RunHeader, list[RequestRecord], KvEvents]:
    """A simulated run as a recorded one. Its clock is the simulator's count of events, so that nothing happens at once.

    Args:
        workload: what was played.
        outcome: of ``simulate(..., log_evictions=True)``, without a host tier.
        found: of ``explain``; theory is taken from it.
    """
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
        start = float(fate["start_stamp"])
        best = found[number].aligned
        records.append(
            RequestRecord(
                session=key[0], flow=key[1], turn=key[2], ready_s=float(fate["ready_stamp"]),
                sent_s=float(fate["ready_stamp"]), first_token_s=start + 0.6, done_s=float(fate["done_stamp"]),
                think_s=0.0, prompt_tokens=int(request["prompt"]), prompt_tokens_reported=int(request["prompt"]),
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
            steps.append((float(fate["done_stamp"]), [("store", 1, _pairs(answer))]))
    batches = [
        EventBatch(seq=seq, ts=at + 0.5, at=at + 0.5, ops=tuple(done))
        for seq, (at, done) in enumerate(sorted(steps, key=lambda step: step[0]))
    ]
    header = EventHeader(header=1, endpoint="simulator", page_size=workload.page_size, pair_keys=False, emptied=True)
    return _header(workload, outcome), sorted(records, key=lambda r: r.done_s), KvEvents(header, batches, paths)


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
def main(requests: int, page_size: int, clients: int, capacity: float) -> None:
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
        made = subprocess.run(
            [sys.executable, "-c", _REPORT, "report", str(run), "--json", "-"], capture_output=True, check=True
        )
        seconds = time.monotonic() - began
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        peak_kb = int(made.stderr.decode().rsplit("VmHWM:", 1)[1].split()[0])
        why = json.loads(made.stdout)["attribution"]
        page = (run / "report.html").stat().st_size
    reported = {row["cause"]: row["tokens"] for row in why["causes"] if row["tokens"]}
    print(
        json.dumps(
            {
                "requests": len(workload.requests),
                "prompt_tokens": workload.prompt_tokens,
                "batches": why["evidence"]["batches"],
                "seconds": round(seconds, 1),
                "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
                "peak_rss_mb": round(peak_kb / 1024),
                "html_mb": round(page / 1e6, 2),
                "hit_rate": round(outcome.rate, 4),
                "causes": reported,
                "same_causes_as_simulator": reported == {cause: n for cause, n in truth.items() if n},
                "unexplained_tokens": why["unexplained_tokens"],
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
