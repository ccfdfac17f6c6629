"""Offload under random faults: ``python -m eval.bench.offload_soak --minutes 10 --seed 1`` prints one JSON object.

The tiny M3 on SGLang, with memory for a quarter of the live contexts, first replays the sessions without offload. Then
a server of the same memory with a daemon and a Redis replays them again and again while a thread kills, freezes and
slows the daemon and kills the Redis, at times drawn from the seed. Every answer is compared with the first server's.
How long requests waited for the tier is what the server counted at each lookup, load and store: how long a request
takes altogether depends on what has to be computed instead, and on the machine. File descriptors, shared memory and
locks are counted before the first fault and after everything has healed.

``--index-reuse freq:2 --eagle3 --policy gittins`` adds those to the server with faults. The first server then has the
same index reuse, which is part of the model, and neither drafts nor a policy, which must not change an answer.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import httpx
import psutil

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.daemon import Daemon
from agentserve.launch.process import ServerProcess
from agentserve.launch.tiny import tiny_server
from eval.bench.offload_gain import PAGE, answers_of, computed_though_found
from eval.bench.offload_restore import counted, flush
from eval.bench.offload_rig import Faults, Redis, daemon, descriptors, locks, port_of, segments, wait_until
from eval.bench.prediction_live import Policy, contexts_of
from traces.replay.config import ReplayConfig
from traces.replay.record import RequestRecord
from traces.replay.run import replay
from traces.replay.store import read_run

TRACE = "generated:preset=tiny,sessions=12,seed=5,block_size=64"
LOOKUP_S, LOAD_S, STORE_S = 2.0, 2.0, 5.0
DEADLINES = {"lookup": LOOKUP_S, "load": LOAD_S, "store": STORE_S}
SLACK_S = 1.0
CHUNK_TOKENS = 1024  # of a prefill: a lookup is looked after between two steps, so these are to be short
GAUGES = re.compile(r"^agentserve_offload_online\{[^}]*\} (\S+)$", re.MULTILINE)
WAITS = re.compile(r"^agentserve_offload_wait_seconds_(bucket|count|sum)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
COUNTS = {"not_stored": "agentserve_offload_tokens_not_stored_total", "evicted": "agentserve_evicted_tokens_total"}
LOADS = re.compile(r'^agentserve_offload_seconds_total\{[^}]*wait="load"[^}]*\} (\S+)$', re.MULTILINE)


def metrics(http: httpx.Client) -> tuple[bool, float]:
    """Whether the daemon is in use, and the seconds that the scheduler has waited for loads."""
    text = http.get("/metrics").text
    gauges = [float(value) for value in GAUGES.findall(text)]
    return bool(gauges) and min(gauges) == 1, sum(float(value) for value in LOADS.findall(text))


def policy_counts(text: str) -> dict[str, dict[str, int]]:
    """What a policy left out of the tier by reason, and evicted by victim, in tokens; empty without a policy."""
    found: dict[str, Counter[str]] = {}
    for name, metric in COUNTS.items():
        for labels, value in re.findall(rf"^{metric}\{{([^}}]*)\}} (\S+)$", text, re.MULTILINE):
            label = dict(LABEL.findall(labels))
            found.setdefault(name, Counter())[label.get("reason") or label["victim"]] += int(float(value))
    return {name: dict(counts) for name, counts in found.items()}


def waits(text: str, deadlines: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """What a scrape says of the waits for lookups, loads and stores, all ranks together.

    Args:
        text: of ``/metrics``.
        deadlines: seconds by wait; a second more is a bound of the histogram.

    Returns:
        By wait: how many there were, their seconds, the bound of the histogram that none exceeded (may be infinite),
        and how many took longer than the deadline plus ``SLACK_S``.
    """
    counts: dict[str, dict[float, float]] = {name: {} for name in deadlines}
    found = {name: {"count": 0.0, "seconds": 0.0} for name in deadlines}
    for kind, labels, value in WAITS.findall(text):
        label = dict(LABEL.findall(labels))
        name = label["wait"]
        if kind == "bucket":
            bound = float(label["le"])
            counts[name][bound] = counts[name].get(bound, 0.0) + float(value)
        else:
            found[name]["count" if kind == "count" else "seconds"] += float(value)
    for name, deadline in deadlines.items():
        total = found[name]["count"]
        found[name]["none_longer_than_s"] = min((b for b, n in counts[name].items() if n == total), default=0.0)
        found[name]["over_deadline_and_1_s"] = total - counts[name].get(deadline + SLACK_S, 0.0)
    return found


class Watch(threading.Thread):
    """Samples the server once a second: how long it was without the daemon, and its longest wait for a load."""

    def __init__(self, url: str) -> None:
        super().__init__(name="watch", daemon=True)
        self._url = url
        self._end = threading.Event()
        self.samples = self.online = 0
        self.longest_wait_s = 0.0

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as http:
            _, before = metrics(http)
            while not self._end.wait(1.0):
                online, waited = metrics(http)
                self.samples += 1
                self.online += online
                self.longest_wait_s = max(self.longest_wait_s, waited - before)
                before = waited

    def stop(self) -> None:
        self._end.set()
        self.join()


def one_pass(config: ReplayConfig, url: str, out: Path, *, flush_first: bool) -> list[RequestRecord]:
    """Replay all sessions once. Raises RuntimeError when it did not finish; failed requests have records too."""
    settings = config.model_copy(update={"url": url, "out": out, "flush_cache": flush_first})
    result = replay(settings, handle_signals=False)
    if result.status != "finished":
        raise RuntimeError(f"{out.name}: {result.status}")
    return list(read_run(out).records())


def holdings(server: ServerProcess, running: Daemon, http: httpx.Client) -> dict[str, Any]:
    """What server and daemon hold while nothing runs; the device's cache is emptied on the way."""
    wait_until(lambda: metrics(http)[0], 240, "the server uses the daemon again")
    flush(http)  # refused while a page is locked, set aside or being stored
    # The daemon hears of ends after the answer; its own time-out of locks is 300 s.
    started = time.monotonic()
    while any(locks(running).values()) and time.monotonic() - started < 60:
        time.sleep(0.5)
    waited = time.monotonic() - started
    root = psutil.Process(server.pid)
    pids = {root.pid, *(child.pid for child in root.children(recursive=True))}
    return {
        "descriptors": descriptors(pids),
        "segments": segments(pids),
        "locks": locks(running),
        "seconds_until_the_locks_were_given_back": round(waited, 1),
    }


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """After less before: most of any process' descriptors, segments, and every kind of lock."""
    was, now = before["descriptors"], after["descriptors"]
    return {
        "descriptors": max((now[pid] - was.get(pid, 0) for pid in now), default=0),
        "processes": len(now) - len(was),
        "segments": after["segments"] - before["segments"],
        **{name: after["locks"][name] - before["locks"][name] for name in after["locks"]},
    }


def duration(record: RequestRecord) -> float:
    return record.done_s - record.sent_s


def answers(records: Sequence[RequestRecord]) -> dict[str, str]:
    """The beginning of each answer's digest, by request."""
    return {"/".join(map(str, key)): (digest or "")[:16] for key, digest in answers_of(records).items()}


def judge(passes: Sequence[list[RequestRecord]], known: Mapping[str, str]) -> dict[str, Any]:
    """Answers against the run without offload, failures, and how long requests took altogether."""
    records = [record for one in passes for record in one]
    answered = _answered(records)
    wrong = [key for one in passes for key, digest in answers(_answered(one)).items() if digest != known[key]]
    times = sorted(duration(record) for record in records)
    return {
        "passes": len(passes),
        "requests": len(records),
        "failed_requests": len(records) - len(answered),
        "verifications_of_drafts": sum(sum(record.accepted_drafts or []) for record in records),
        "wrong_answers": len(wrong),
        "slowest_request_s": round(times[-1], 2),
        "median_request_s": round(times[len(times) // 2], 3),
        "from_host_tier": round(sum(r.cached_storage or 0 for r in records) / sum(r.prompt_tokens for r in records), 4),
        "computed_though_found": computed_though_found(records),
    }


def together(seeds: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All seeds' runs in one: what there was, what was wrong, and the most that anything has grown."""
    runs = list(seeds.values())
    faulty = [run["with_faults"] for run in runs]
    return {
        "minutes": sum(run["minutes"] for run in runs),
        "faults": dict(sum((Counter(run["faults"]) for run in runs), Counter())),
        **{name: sum(one[name] for one in faulty) for name in ("requests", "failed_requests", "wrong_answers")},
        "waited_over_deadline_and_1_s": {
            name: sum(run["waits"][name]["over_deadline_and_1_s"] for run in runs) for name in DEADLINES
        },
        "growth": {name: max(run["growth"][name] for run in runs) for name in runs[0]["growth"]},
    }


def good(found: dict[str, Any]) -> bool:
    """Whether nothing was wrong, nobody waited too long, and nothing has grown, in what ``together`` says."""
    bad = found["failed_requests"] + found["wrong_answers"] + sum(found["waited_over_deadline_and_1_s"].values())
    return not bad and all(by <= 0 for by in found["growth"].values())


def at_work(features: Mapping[str, Any], seeds: Mapping[str, dict[str, Any]]) -> bool:
    """Whether drafts were verified and victims chosen by the policy in each run that was to do so."""
    return all(
        ("eagle3" not in features or run["with_faults"]["verifications_of_drafts"] > 0)
        and ("policy" not in features or sum(run["policy"].get("evicted", {}).values()) > 0)
        for run in seeds.values()
    )


def _answered(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [record for record in records if record.error is None]


@click.command(context_settings={"show_default": True})
@click.argument("trace", default=TRACE)
@click.option("--minutes", default=5.0, help="Of faults, for each seed.")
@click.option("--seed", "seeds", multiple=True, type=int, default=(1, 2), help="Of the faults; may be repeated.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON; kept and added to.")
@click.option("--concurrency", default=12, help="Sessions active at once.")
@click.option("--max-turns", default=3)
@click.option("--max-output", default=4)
@click.option("--max-context", default=3000)
@click.option("--think", default="scaled:0.1,capped:4")
@click.option("--index-reuse", help="As freq:2, on both servers.")
@click.option("--eagle3", is_flag=True, help="Drafts, really verified, on the server with faults.")
@click.option("--policy", help="EVICTION[+ADMISSION], as gittins, on the server with faults.")
def main(
    trace: str, minutes: float, seeds: tuple[int, ...], out: Path | None, index_reuse: str | None, eagle3: bool,
    policy: str | None, **settings: Any,
) -> None:  # fmt: skip
    """Run what FILE lacks; exit code 1 when an answer differs, a request fails or waits too long, or anything grew."""
    asked = {"command": "python -m eval.bench.offload_soak", "trace": trace, **settings, "deadlines_s": DEADLINES}
    features = {"index_reuse": index_reuse, "eagle3": eagle3, "policy": policy}
    asked["features"] = {name: value for name, value in features.items() if value}
    report: dict[str, Any] = {**asked, "seeds": {}}
    if out is not None and out.exists():
        report = json.loads(out.read_text())
        if any(report.get(name, {}) != value for name, value in asked.items()):
            raise click.UsageError(f"{out} holds runs with other options: give another --out, or remove it")
    with tempfile.TemporaryDirectory(prefix="offload-soak-") as name:
        folder = Path(name)
        config = ReplayConfig(trace=trace, out=folder, **settings)
        capacity = report["capacity_tokens"] = int(contexts_of(config) / 4) // PAGE * PAGE
        checkpoint = write_tiny_checkpoint(folder / "m3")
        common: dict[str, Any] = {"kv.capacity_tokens": capacity, "prefill_chunk": CHUNK_TOKENS}
        if index_reuse is not None:
            common["index_reuse"] = index_reuse
        if "without_offload" not in report:
            with tiny_server(common, checkpoint=checkpoint, log=folder / "plain.log") as server:
                plain = one_pass(config, server.plan.url, folder / "plain", flush_first=True)
            report["without_offload"] = {
                "requests": len(plain),
                "slowest_request_s": round(max(map(duration, plain)), 2),
                "answers": answers(plain),
            }
            save(report, out)
            click.echo(f"without offload: {len(plain)} requests", err=True)
        if eagle3:
            common["eagle3.draft"] = str(write_tiny_eagle3(folder / "draft"))
        if policy is not None:
            chosen = Policy.parse(policy)
            common |= {"radix.policy": chosen.eviction, "radix.admission": chosen.admission}
        for seed in seeds:
            if str(seed) not in report["seeds"]:
                run = faulty_run(config, common, checkpoint, folder / str(seed), minutes=minutes, seed=seed)
                run["with_faults"] = judge(run.pop("records"), report["without_offload"]["answers"])
                report["seeds"][str(seed)] = {"minutes": minutes, **run}
                report["together"] = together(report["seeds"])
                save(report, out)
    click.echo(json.dumps(report, indent=1))
    sys.exit(0 if good(report["together"]) and at_work(asked["features"], report["seeds"]) else 1)


def save(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def faulty_run(
    config: ReplayConfig, common: dict[str, Any], checkpoint: Path, folder: Path, *, minutes: float, seed: int
) -> dict[str, Any]:
    """A server with a daemon and a Redis that faults are injected into; see ``soak``."""
    folder.mkdir()
    redis = Redis(folder)
    redis.start()
    try:
        with daemon(folder, l2=redis.url, frozen_after_s=30) as running:
            overrides = common | {
                "offload.backend": "lmcache",
                "offload.address": f"127.0.0.1:{port_of(running)}",
                "offload.lookup_deadline": LOOKUP_S,
                "offload.load_deadline": LOAD_S,
                "offload.store_deadline": STORE_S,
            }
            with tiny_server(overrides, checkpoint=checkpoint, log=folder / "server.log") as server:
                own = config.model_copy(update={"out": folder})
                return soak(own, server, running, redis, minutes=minutes, seed=seed)
    finally:
        redis.kill()


def soak(
    config: ReplayConfig, server: ServerProcess, running: Daemon, redis: Redis, *, minutes: float, seed: int
) -> dict[str, Any]:
    """A pass without faults, then passes with them, then healing; what was counted, and the records of all passes."""
    url = server.plan.url
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
        passes = [one_pass(config, url, config.out / "warm", flush_first=True)]
        before = holdings(server, running, http)
        faults, watch = Faults(seed, running, redis, 60 * minutes), Watch(url)
        end = time.monotonic() + 60 * minutes
        watch.start()
        faults.start()
        while time.monotonic() < end and faults.is_alive():
            passes.append(one_pass(config, url, config.out / f"pass-{len(passes)}", flush_first=False))
            click.echo(f"pass {len(passes) - 1}: {end - time.monotonic():.0f} s left, {dict(faults.done)}", err=True)
        faults.stop()
        watch.stop()
        # It resumes by itself: a last pass has hits from the tier again.
        wait_until(lambda: metrics(http)[0], 240, "the server uses the daemon again")
        passes.append(one_pass(config, url, config.out / "healed", flush_first=True))
        after = holdings(server, running, http)
        events = ("stored", "restored", "verified", "refused", "abandoned", "quarantined", "released")
        return {
            "records": passes,
            "faults": dict(faults.done),
            "daemon_starts": running.starts,
            "online_share_of_samples": round(watch.online / max(1, watch.samples), 3),
            "longest_wait_for_a_load_s": round(watch.longest_wait_s, 2),
            "waits": waits(http.get("/metrics").text, DEADLINES),
            "tokens": {event: counted(http, event) for event in events},
            "policy": policy_counts(http.get("/metrics").text),
            "healed_pass_from_host_tier": sum(r.cached_storage or 0 for r in passes[-1]),
            "before": before,
            "after": after,
            "growth": growth(before, after),
        }


if __name__ == "__main__":
    main()
