"""What happens when something of offload fails, and how long a request waits: ``python -m eval.bench.offload_faults``.

SGLang's cache and allocator, an M3 KV pool and the real connector, without a model, against a real daemon and a real
Redis that are frozen, slowed, killed, restarted, missing, damaged or full. Each row is what one request went through:
the seconds that it waited for offload (computing what was not restored comes on top and is the same as without), its
deadlines, whether what it got is what was stored (or nothing), and how long until the tier gave hits again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import click
import torch

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.launch.daemon import Daemon
from agentserve.launch.host import free_port
from eval.bench.offload_bed import LENGTH, RESUME_S, TIMES, Bed, Row, later, timed
from eval.bench.offload_rig import CHUNK, Redis, crawl, daemon, frozen, port_of, send, wait_until
from offload.settings import OffloadError
from tests.offload_lab import PAGE, fill, lab, rows, same, tokens_of


def in_lookup(bed: Bed, *, kill: bool) -> Row:
    ids, _ = bed.stored()
    total = bed.free()
    with frozen(bed.daemon):
        request = bed.lab.request("lookup", ids)
        with later(0.3, lambda: send(bed.daemon, signal.SIGKILL) if kill else None):
            waited, found = timed(lambda: bed.lab.found(request))
        next_wait, again = timed(lambda: bed.lab.found(bed.lab.request("next", ids)))
        bed.lab.connector.finish_request("lookup")
    resumed = bed.resumed()
    return Row(
        "daemon killed in a lookup" if kill else "daemon frozen in a lookup",
        f"a miss; the next request does not ask ({next_wait:.2f} s)",
        waited,
        max(TIMES.lookup_deadline, TIMES.ping_deadline + TIMES.ping_interval) + 1,
        found == 0 and again == 0 and bed.all_free(total),
        resumed,
    )


def in_load(bed: Bed, *, kill: bool) -> Row:
    ids, _ = bed.stored()
    total = bed.free()
    request = bed.lab.request("load", ids)
    found = bed.lab.found(request)
    with frozen(bed.daemon):
        with later(0.3, lambda: send(bed.daemon, signal.SIGKILL) if kill else None):
            waited, slots = timed(lambda: bed.lab.load(request))
        aside = total - bed.free() if not kill else LENGTH
    resumed = bed.resumed()
    return Row(
        "daemon killed in a load" if kill else "daemon frozen in a load",
        "recomputed; " + ("slots free once it is seen dead" if kill else "slots set aside until it has answered"),
        waited,
        TIMES.load_deadline + 1,
        found == LENGTH and slots is None and aside == LENGTH and bed.all_free(total),
        resumed,
    )


def in_store(bed: Bed, *, kill: bool) -> Row:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids, total = bed.prompt(), bed.free()
    bench = bed.lab
    slots = bench.take(LENGTH)
    bench.cache.insert(InsertParams(key=RadixKey(array("q", ids), None), value=slots, prev_prefix_len=0))
    with frozen(bed.daemon):
        started = time.monotonic()
        bench.cache._submit_store(SimpleNamespace(rid="slow", extra_key=None, cache_salt=None), array("q", ids))
        with later(0.3, lambda: send(bed.daemon, signal.SIGKILL) if kill else None):
            # Not has_pending_cache_operations(): that also counts requests of earlier rows that nobody ends here.
            wait_until(lambda: (bed.free(), not bench.cache._pending_stores)[1], 60, "the store is given up")
        waited = time.monotonic() - started
        bench.cache.evict(EvictParams(num_tokens=LENGTH))
        evicted = bed.free() == total
        fill(bench.pool, 5)  # others use the slots while a frozen daemon still has the order to read them
    resumed = bed.resumed()
    request = bench.request("poisoned", ids)
    wrong = bench.found(request) and bench.load(request) is not None
    return Row(
        "daemon killed in a store" if kill else "daemon frozen in a store",
        "its tokens can be evicted; what it stores late is refused",
        waited,
        TIMES.store_deadline + 1,
        evicted and not wrong and bed.all_free(total),
        resumed,
    )


def slow(bed: Bed) -> Row:
    """A daemon that gets a hundredth of the time: loads are late, and written when the slots' fate is decided."""
    ids, _ = bed.stored()
    total = bed.free()
    bench = bed.lab
    request = bench.request("slow", ids)
    found = bench.found(request)
    with frozen(bed.daemon):
        waited, slots = timed(lambda: bench.load(request))
        others = bench.take(total - LENGTH)
        theirs = rows(bench.pool, others)
        aside = torch.ones(bench.pool.size + PAGE, dtype=torch.bool)
        aside[others], aside[:PAGE] = False, False
        before = rows(bench.pool, aside.nonzero().flatten())
    crawl(bed.daemon, 2.0, stop_s=0.3, run_s=0.003)
    wait_until(lambda: bench.cache._quarantine.ready() != 0, 60, "the late load ends")
    wrote = not same(rows(bench.pool, aside.nonzero().flatten()), before)
    untouched = same(rows(bench.pool, others), theirs)
    bench.allocator.free(others)
    resumed = bed.resumed()
    return Row(
        "slow daemon: load written after it was given up",
        "recomputed; the late write hit slots set aside only, another request's were untouched",
        waited,
        TIMES.load_deadline + 1,
        found == LENGTH and slots is None and wrote and untouched and bed.all_free(total),
        resumed,
    )


def restarted(bed: Bed) -> Row:
    ids, _ = bed.stored()
    total, starts = bed.free(), bed.daemon.starts
    send(bed.daemon, signal.SIGTERM)
    wait_until(lambda: not bed.lab.connector.online, 60, "the loss is noticed")
    waited, found = timed(lambda: bed.lab.found(bed.lab.request("meanwhile", ids)))
    resumed = bed.resumed()
    right = found == 0 and bed.daemon.starts > starts and bed.all_free(total)
    return Row("daemon restarted", "not asked while it is away; registered again", waited, 1.0, right, resumed)


def redis_lost(bed: Bed, redis: Redis) -> Row:
    ids, _ = _in_redis(bed, redis)
    _forget(bed)
    redis.kill()
    waited, found = timed(lambda: bed.lab.found(bed.lab.request("no redis", ids)))
    bed.lab.connector.finish_request("no redis")
    redis.start()
    started = time.monotonic()
    _in_redis(bed, redis)
    resumed = time.monotonic() - started
    now = "misses; written to again by the same daemon"
    return Row("Redis killed and restarted", now, waited, TIMES.lookup_deadline + 1, found == 0, resumed)


def redis_values(bed: Bed, redis: Redis, *, cut: bool) -> Row:
    ids, _ = _in_redis(bed, redis)
    (redis.cut_values if cut else redis.damage_values)()
    _forget(bed)
    total = bed.free()
    request = bed.lab.request("damaged", ids)

    started = time.monotonic()
    found = bed.lab.found(request)
    slots = bed.lab.load(request) if found else None
    waited = time.monotonic() - started
    bed.lab.connector.finish_request("damaged")
    now = f"{'refused' if found else 'not found'}, recomputed"
    right = slots is None and bed.all_free(total)
    limit = TIMES.lookup_deadline + TIMES.load_deadline + 1
    return Row("truncated data in Redis" if cut else "changed data in Redis", now, waited, limit, right)


def _in_redis(bed: Bed, redis: Redis) -> tuple[list[int], list[torch.Tensor]]:
    """A new prompt that has reached Redis."""
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        before = redis.keys()
        try:
            ids, held = bed.stored()
            wait_until(lambda before=before: redis.keys() == before + LENGTH // CHUNK, 10, "Redis has it")  # type: ignore[misc]
        except RuntimeError:
            continue  # a client that is about to reconnect: the daemon has it in memory only
        return ids, held
    raise RuntimeError("the daemon writes nothing to Redis")


def _forget(bed: Bed) -> None:
    """Restart the daemon: what it had in memory is gone."""
    starts = bed.daemon.starts
    send(bed.daemon, signal.SIGKILL)
    wait_until(lambda: not bed.lab.connector.online, 60, "the loss is noticed")
    wait_until(lambda: bool(bed.lab.connector.online) and bed.daemon.starts > starts, RESUME_S, "the daemon is back")


def no_daemon(folder: Path, checkpoint: Path) -> Row:
    port = free_port()
    settings = replace(TIMES, port=port)
    started = time.monotonic()
    with lab(settings, checkpoint) as bench:
        begun = time.monotonic() - started
        waited, found = timed(lambda: bench.found(bench.request("alone", tokens_of(1, LENGTH))))
        online = bench.connector.online
        with daemon(folder, memory_gb=0.5, port=port) as running:
            resumed = Bed(bench, running).resumed()
    now = f"the server starts (its cache in {begun:.1f} s), no request is delayed; a daemon is used once it is there"
    return Row("no daemon at the start", now, waited, 1.0, found == 0 and not online, resumed)


def other_weights(running: Daemon, folder: Path) -> Row:
    settings = replace(TIMES, port=port_of(running))
    with lab(settings, write_tiny_checkpoint(folder / "same", seed=1)) as bench:
        ids, held = Bed(bench, running).stored()
        known = Bed(bench, running).hit(ids, held)
    write_tiny_checkpoint(folder / "other", seed=2)
    for file in (folder / "other").iterdir():
        file.replace(folder / "same" / file.name)
    with lab(settings, folder / "same") as bench:
        waited, found = timed(lambda: bench.found(bench.request("other", ids)))
    case = "other weights of the same shape under the same name"
    return Row(case, "a miss: the key names the weights", waited, TIMES.lookup_deadline + 1, known and found == 0)


def other_chunks(running: Daemon, checkpoint: Path) -> Row:
    try:
        with lab(replace(TIMES, port=port_of(running), chunk_tokens=2 * CHUNK), checkpoint):
            message = ""
    except OffloadError as error:
        message = str(error)
    named = str(CHUNK) in message and str(2 * CHUNK) in message
    return Row("daemon with another chunk size", "the server does not start: the error names both", None, None, named)


def full_shared_memory(checkpoint: Path) -> Row:
    """``agentserve launch`` where /dev/shm has 4 MB, in a mount namespace of its own."""
    code = "from agentserve.cli import main; main()"
    launch = f"{sys.executable} -c '{code}' launch tiny-cpu --model {checkpoint} --offload lmcache"
    inside = f"mount -t tmpfs -o size=4m tmpfs /dev/shm && exec {launch} --set port={free_port()}"
    started = time.monotonic()
    done = subprocess.run(["unshare", "-m", "sh", "-c", inside], capture_output=True, text=True, timeout=120)
    seconds = time.monotonic() - started
    text = done.stdout + done.stderr
    line = next((part.strip() for part in text.splitlines() if "/dev/shm" in part), text[-300:]).partition(" Fix:")[0]
    now = f"an error after {seconds:.0f} s, before anything is started ({line.removeprefix('error: ').rstrip('.')})"
    return Row("/dev/shm full", now, None, None, done.returncode != 0 and "/dev/shm" in text)


def measure(folder: Path) -> Iterator[Row]:
    """All rows, each as soon as it is known."""
    checkpoint = write_tiny_checkpoint(folder / "m3")
    yield full_shared_memory(checkpoint)
    for name in ("late", "plain", "redis"):
        (folder / name).mkdir()
    yield no_daemon(folder / "late", checkpoint)
    with daemon(folder / "plain", memory_gb=0.5) as running:
        yield other_chunks(running, checkpoint)
        yield other_weights(running, folder)
        with lab(replace(TIMES, port=port_of(running)), checkpoint) as bench:
            bed = Bed(bench, running)
            for phase in (in_lookup, in_load, in_store):
                yield phase(bed, kill=False)
            yield slow(bed)
            for phase in (in_lookup, in_load, in_store):
                yield phase(bed, kill=True)
            yield restarted(bed)
    redis = Redis(folder)
    redis.start()
    try:
        with (
            daemon(folder / "redis", memory_gb=0.5, l2=redis.url) as running,
            lab(replace(TIMES, port=port_of(running)), checkpoint) as bench,
        ):
            bed = Bed(bench, running)
            yield redis_lost(bed, redis)
            yield redis_values(bed, redis, cut=False)
            yield redis_values(bed, redis, cut=True)
    finally:
        redis.kill()


def markdown(found: list[Row]) -> str:
    """The table for docs/design/offload.md."""
    lines = ["| case | now | a request waits | hits again after |", "|---|---|---|---|"]
    for row in found:
        waits = "-" if row.waited_s is None else f"{row.waited_s:.2f} s (at most {row.limit_s:g})"
        resumed = "-" if row.resumed_s is None else f"{row.resumed_s:.1f} s"
        lines.append(f"| {row.case} | {row.now} | {waits} | {resumed} |")
    return "\n".join(lines)


def report(found: list[Row]) -> dict[str, object]:
    """What is stored of the rows."""
    deadlines = {name: getattr(TIMES, name) for name in ("lookup_deadline", "load_deadline", "store_deadline")}
    return {
        "command": "python -m eval.bench.offload_faults",
        "tokens": LENGTH,
        **deadlines,
        "all_good": all(row.good for row in found),
        "rows": [asdict(row) | {"good": row.good} for row in found],
    }


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result as JSON here too.")
def main(out: Path | None) -> None:
    """Go through all rows; exit code 1 when one is wrong or waited longer than its deadline plus 1 s."""
    os.environ.setdefault("SGLANG_PLATFORM", "agentserve_cpu")
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="offload-faults-") as folder:
        for row in measure(Path(folder)):
            found.append(row)
            click.echo(f"{'good' if row.good else 'BAD'}: {row}", err=True)
            if out is not None:  # after each row: a run of many minutes that is stopped leaves what it had
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report(found), indent=1) + "\n")
    click.echo(markdown(found))
    sys.exit(0 if all(row.good for row in found) else 1)


if __name__ == "__main__":
    main()
