"""Does the simulator predict a live server, and does what it promises come true there?

    python -m eval.bench.prediction TRACE --out FOLDER [--json FILE]

starts the tiny M3 on SGLang once for each policy, with memory for the mean of the live contexts, replays the same
sessions on each, and plays what every run's scheduler did, step by step, on the simulator (of a server without our
policies: when its requests were sent and answered). Sessions are interleaved; of the runs in ``--predict`` at most
``--in-flight`` requests are open at once, those in ``--beside`` come as the sessions send them. The first of
``--beside`` is what the others are measured against. Called again with the same FOLDER it goes on with the runs that
are missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.runtime.policy_journal import JournalEvent
from eval.bench.prediction_compare import Prediction, compare
from eval.bench.prediction_live import LiveRun, Policy, contexts_of, live_run, measured_contexts
from eval.bench.prediction_workload import Played, played_run
from traces.replay.config import ReplayConfig

PREDICT = ("lru", "ttl:6", "gittins")
IN_FLIGHT = (1, 4)
BESIDE = ("sglang", "gittins+gate:0.9")


@click.command(context_settings={"show_default": True})
@click.argument("trace")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the result here too.")
@click.option("--sessions", default=14)
@click.option("--concurrency", default=7, help="Sessions active at once.")
@click.option("--max-turns", default=10)
@click.option("--tokens-per-block", type=int, help="Reduce the trace's blocks to this many tokens.")
@click.option("--max-context", default=3500)
@click.option("--max-output", default=4)
@click.option("--think", default="scaled:0.1,capped:6")
@click.option("--capacity", "ratio", default=1.0, help="Memory over the mean of the live contexts.")
@click.option("--predict", multiple=True, default=PREDICT, help="Policies, or none.")
@click.option("--in-flight", multiple=True, type=int, default=IN_FLIGHT, help="Open requests of these runs.")
@click.option("--beside", multiple=True, default=BESIDE, help="Policies, or none.")
def main(
    trace: str,
    out: Path,
    json_path: Path | None,
    ratio: float,
    predict: Sequence[str],
    in_flight: Sequence[int],
    beside: Sequence[str],
    **settings: Any,
) -> None:
    """Run the servers one after the other and print what came of each."""
    config = ReplayConfig(trace=trace, out=out, **settings)
    capacity = int(ratio * contexts_of(config)) // 128 * 128
    checkpoint = out / "checkpoint"
    if not checkpoint.exists():
        write_tiny_checkpoint(checkpoint)
    result: dict[str, Any] = {"trace": Path(trace).name, **settings, "capacity_tokens": capacity, "runs": {}}
    sets = [(f"predict-{n}", f"{n} in flight", predict, {"in_flight": n}) for n in in_flight]
    sets.append(("beside", f"{config.concurrency} sessions at once", beside, {}))
    for kind, title, names, more in sets:
        first: LiveRun | None = None
        for name in () if tuple(names) == ("none",) else names:
            live = _run(name, config, kind, more, capacity, checkpoint)
            first = first or live
            entry = _report(live, config.concurrency)
            entry["points_over_first"] = round(100 * (live.rate - first.rate), 2)
            entry["same_answers_as_first"] = live.answers() == first.answers()
            result["runs"][f"{name}, {title}"] = entry
            _write(result, json_path)
    click.echo(json.dumps(result, indent=1))


def _write(result: dict[str, Any], path: Path | None) -> None:
    """After each server: a run of many minutes that is stopped leaves what it had."""
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


def _run(name: str, config: ReplayConfig, kind: str, more: dict[str, Any], capacity: int, checkpoint: Path) -> LiveRun:
    policy = Policy.parse(name)
    folder = config.out / f"{kind}-{policy.name.replace(':', '-')}"
    click.echo(f"{policy.name} ...", err=True)
    return live_run(policy, config.model_copy(update={"out": folder, **more}), capacity=capacity, checkpoint=checkpoint)


def predictions(live: LiveRun) -> dict[str, Prediction]:
    """What the simulator says, from what it is told of the run.

    ``client_times``: when requests were sent and answered. Where the server wrote a journal also ``server_times``: when
    it started and ended them; and ``server_steps``: what its scheduler did, allocation by allocation.
    """

    def said(played: Played) -> Prediction:
        return compare(
            played,
            policy=live.policy.eviction if live.policy.ours else "lru",
            capacity=live.capacity,
            truncate=live.policy.ours,
            live_evicted=live.evicted,
        )

    def played(journal: list[JournalEvent] | None) -> Played:
        return played_run(live.sent, live.run.events, live.page_size, told=live.policy.ours, journal=journal)

    found = {"client_times": said(played(None))}
    if live.journal is not None:
        own = played(live.journal)
        found |= {"server_times": said(own._replace(steps=None)), "server_steps": said(own)}
    return found


def _report(live: LiveRun, concurrency: int) -> dict[str, Any]:
    contexts = measured_contexts(live.records, concurrency)
    entry: dict[str, Any] = {
        "requests": len(live.records),
        "theoretical_rate": round(100 * live.theoretical, 3),
        "live_rate": round(100 * live.rate, 3),
        "capacity_over_live_contexts": round(live.capacity / contexts, 3),
        "retracted": live.retracted,
        "seconds": round(max(r.done_s for r in live.records), 1),
    }
    for told_of, said in predictions(live).items():
        told = asdict(said)
        differences = told.pop("differences")
        entry[f"predicted_from_{told_of}"] = {
            "rate": round(100 * said.predicted_rate, 3),
            "points_off": round(said.points_off, 3),
            "same_cached_tokens": round(100 * said.same, 2),
            "overlapping": said.overlapping,
            "refused": said.refused,
            "evicted_live_and_predicted": [said.live_evicted, said.predicted_evicted],
            "reasons": said.reasons,
            "differences": differences[:20],
        }
    return entry


if __name__ == "__main__":
    main()
