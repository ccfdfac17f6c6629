"""What a host tier adds to the hit rate: ``python -m eval.bench.offload_gain`` prints one JSON object.

The tiny M3 on SGLang replays the same sessions four times: with memory for half and for all of the mean live contexts,
each time with LMCache behind it and without. Nothing else differs. Beside the rates stand where the hits came from,
what a cache that never evicts would have hit and why each run hit less (as ``agentserve report``), that all four gave
the same answers, and that no page was refused. Then a server takes prompts of 8,000 tokens computed, restored and from
its own cache (as ``eval.bench.offload_restore``).

FILE keeps the replays that are done: call it again with the same options to go on.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import httpx

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.launch.host import free_port
from agentserve.launch.tiny import tiny_server
from eval.bench.offload_restore import counted, measure
from eval.bench.prediction_live import contexts_of, measured_contexts
from eval.report import load_run, summarize
from radix_cache.rates import hit_tokens
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import replay
from traces.replay.store import read_run

TRACE = "generated:preset=tiny,sessions=8,seed=5,block_size=64"
PAGE = 128


def offload_overrides(memory_gb: float = 2.0) -> dict[str, Any]:
    """Recipe fields of a server with a daemon of its own, on free ports."""
    return {
        "offload.backend": "lmcache",
        "offload.port": free_port(),
        "offload.http_port": free_port(),
        "offload.memory_gb": memory_gb,
    }


def answers_of(records: Sequence[RequestRecord]) -> dict[tuple[str, str, int], str | None]:
    """Digest of each answer, by request."""
    return {(r.session, r.flow, r.turn): r.output_sha256 for r in records}


def rates(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Where the prompt tokens of a run came from, as shares of all, and what they waited for."""
    prompts = sum(r.prompt_tokens for r in records)
    storage = sum(r.cached_storage or 0 for r in records)
    cached = sum(r.cached_tokens or 0 for r in records)
    never_evicting = sum(hit_tokens(r.shared_output_lcp, r.prompt_tokens, PAGE) for r in records)
    firsts = [r.first_token_s - r.sent_s for r in records if r.first_token_s is not None]
    return {
        "requests": len(records),
        "prompt_tokens": prompts,
        "hit_rate": round(cached / prompts, 4),
        "from_device": round((cached - storage) / prompts, 4),
        "from_host_tier": round(storage / prompts, 4),
        "never_evicting_hit_rate": round(never_evicting / prompts, 4),
        "median_seconds_to_first_token": round(statistics.median(firsts), 3),
    }


def computed_though_found(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Tokens that the tier said it has and that were computed, by what became of the load; "not loaded": no room, or
    the device had them when it was asked, or what they continue, and had evicted that when the request could start."""
    found: Counter[str] = Counter()
    for r in records:
        if r.offload is not None and r.cached_tokens is not None and r.offload.found > r.cached_tokens:
            found[r.offload.load or "not loaded"] += r.offload.found - r.cached_tokens
    return dict(found)


def causes(folder: Path) -> dict[str, float]:
    """Why a run hit less than its prompts shared, as shares of all prompt tokens, by cause."""
    run = load_run(folder)
    if run.kv_events is None or not run.kv_events.header.emptied or run.kv_events.gaps:
        raise RuntimeError(f"{folder.name}: the cache events are not whole from an empty cache on")
    found = summarize(run.header, run.records, run.events, kv_events=run.kv_events).attribution
    return {} if found is None else {row.cause: round(row.rate_difference, 4) for row in found.causes if row.tokens}


def live(config: ReplayConfig, capacity: int, checkpoint: Path, *, offload: bool) -> tuple[dict[str, Any], Any]:
    """One server, one replay; what came of it and its answers. Raises RuntimeError when a request failed."""
    overrides: dict[str, Any] = {"kv.capacity_tokens": capacity, "prefill_chunk": 2048}
    overrides["kv_events"] = f"tcp://*:{free_port()}"
    if offload:
        overrides |= offload_overrides()
    with tiny_server(overrides, checkpoint=checkpoint, log=config.out.with_name(f"{config.out.name}.log")) as server:
        result = replay(config.model_copy(update={"url": server.plan.url}), handle_signals=False)
        with httpx.Client(base_url=server.plan.url, timeout=30) as http:
            events = ("stored", "restored", "verified", "refused", "abandoned") if offload else ()
            tokens = {event: counted(http, event) for event in events}
    if result.status != "finished" or result.tally.failed:
        raise RuntimeError(f"{config.out.name}: {result.status}, {result.tally.failed} failed requests")
    records = list(read_run(config.out).records())
    found = {
        "capacity_tokens": capacity,
        "measured_live_contexts": round(measured_contexts(records, config.concurrency)),
        **rates(records),
        "lost_by_cause": causes(config.out),
        "computed_though_found": computed_though_found(records),
        "offload_tokens": tokens,
    }
    return found, answers_of(records)


def gain(without: dict[str, Any], with_tier: dict[str, Any]) -> dict[str, float]:
    """What the host tier brought between two replays that differ in nothing else."""
    return {
        "points_of_hit_rate": round(100 * (with_tier["hit_rate"] - without["hit_rate"]), 2),
        "recomputed_tokens_less": round(1 - (1 - with_tier["hit_rate"]) / (1 - without["hit_rate"]), 4),
        "of_what_eviction_lost": round(
            (with_tier["hit_rate"] - without["hit_rate"]) / (without["never_evicting_hit_rate"] - without["hit_rate"]),
            4,
        ),
    }


def conclude(result: dict[str, Any]) -> bool:
    """Add the gains and whether all answers agree; true where they do, nothing was refused and restores were exact."""
    runs, result["gain"] = result["runs"], {}
    pairs: dict[str, dict[bool, dict[str, Any]]] = {}
    for run in runs.values():
        pairs.setdefault(f"{run['capacity']:g}", {})[run["host_tier"]] = run
    for capacity, pair in pairs.items():
        result["gain"][capacity] = gain(pair[False], pair[True])
    answers = [run["answers"] for run in runs.values()]
    first = answers[0]
    differing = {key for one in answers for key in one.keys() | first.keys() if one.get(key) != first.get(key)}
    result["answers_compared"], result["differing_answers"] = len(first), len(differing)
    refused = sum(run["offload_tokens"].get("refused", 0) for run in runs.values())
    exact = result.get("prefix_of_8000", {}).get("restored_equals_device_bit_for_bit", True)
    return bool(first) and not differing and not refused and exact


def save(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


@click.command(context_settings={"show_default": True})
@click.argument("trace", default=TRACE)
@click.option("--out", "out", type=click.Path(path_type=Path, dir_okay=False), help="JSON; kept and added to.")
@click.option("--capacity", "capacities", multiple=True, default=(0.5, 1.0), help="Memory over the live contexts.")
@click.option("--rounds", default=2, help="Prompts of 8,000 tokens; 0: none.")
@click.option("--concurrency", default=6, help="Sessions active at once.")
@click.option("--sessions", type=int)
@click.option("--max-turns", default=6)
@click.option("--max-output", default=4)
@click.option("--max-context", default=3000)
@click.option("--tokens-per-block", type=int, help="Reduce the trace's blocks to this many tokens.")
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Leave runs here, for `agentserve report`."
)
@click.option("--think", default="scaled:0.1,capped:4")
def main(
    trace: str, out: Path | None, capacities: Sequence[float], rounds: int, keep: Path | None, **settings: Any
) -> None:
    """Run the servers and print what came of each; exit code 1 when answers differ or a page was refused."""
    asked = {"command": "python -m eval.bench.offload_gain", "trace": Path(trace).name, **settings}
    result: dict[str, Any] = {**asked, "runs": {}}
    if out is not None and out.exists():
        result = json.loads(out.read_text())
        if any(result[name] != value for name, value in asked.items()):
            raise click.UsageError(f"{out} holds runs with other options: give another --out, or remove it")
    with tempfile.TemporaryDirectory(prefix="offload-gain-") as folder:
        checkpoint = write_tiny_checkpoint(Path(folder) / "m3")
        contexts = contexts_of(ReplayConfig(trace=trace, out=Path(folder), **settings))
        for ratio in capacities:
            for offload in (False, True):
                name = f"{ratio:g} of the live contexts, {'with' if offload else 'without'} the host tier"
                if name in result["runs"]:
                    continue
                config = ReplayConfig(trace=trace, out=(keep or Path(folder)) / f"{ratio:g}-{offload}", **settings)
                click.echo(f"{name} ...", err=True)
                run, answers = live(config, int(ratio * contexts) // PAGE * PAGE, checkpoint, offload=offload)
                digests = {"/".join(map(str, key)): (digest or "")[:8] for key, digest in answers.items()}
                result["runs"][name] = {"capacity": ratio, "host_tier": offload, **run, "answers": digests}
                save(result, out)
        if rounds and "prefix_of_8000" not in result:
            click.echo("8,000 tokens ...", err=True)
            overrides = {"kv.capacity_tokens": 4 * 8192} | offload_overrides()
            log = Path(folder) / "prefix.log"
            with tiny_server(overrides, checkpoint=checkpoint, log=log) as server:
                result["prefix_of_8000"] = measure(server.plan.url, rounds)
    good = conclude(result)
    save(result, out)
    for run in result["runs"].values():
        del run["answers"]  # long, and agreed upon above
    click.echo(json.dumps(result, indent=1))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
