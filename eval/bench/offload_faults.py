"""What happens when something of offload fails, and how long a request waits: ``python -m eval.bench.offload_faults``.

SGLang's cache and allocator, an M3 KV pool and the real connector, without a model, against a real daemon and a real
Redis that are frozen, slowed, killed, restarted, missing, damaged or full. Each row is what one request went through:
the seconds that it waited for offload (computing what was not restored comes on top and is the same as without), its
deadlines, whether what it got is what was stored (or nothing), and how long until the tier gave hits again.

FILE keeps the rows that are done, good or bad: call it again to go on.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.launch.daemon import Daemon
from agentserve.launch.host import free_port
from eval.bench.offload_bed import LENGTH, RESUME_S, TIMES, Bed, Row, later, timed
from eval.bench.offload_rig import CHUNK, Redis, crawl, daemon, frozen, port_of, send, wait_until
from eval.bench.offload_two_ranks import one_of_two
from offload.settings import OffloadError
from tests.offload_lab import PAGE, fill, lab, rows, same, tokens_of


def in_lookup(case: str, bed: Bed, *, kill: bool) -> Row:
    ids, _ = bed.stored()
    total = bed.free()
    with frozen(bed.daemon):
        request = bed.lab.request("lookup", ids)
        with later(0.3, lambda: send(bed.daemon, signal.SIGKILL) if kill else None):
            waited, found = timed(lambda: bed.lab.found(request))
        next_wait, again = timed(lambda: bed.lab.found(bed.lab.request("next", ids)))
        bed.lab.connector.finish_request("lookup")
    resumed = bed.resumed()
    checks = {
        "a miss": found == 0,
        "the next request does not ask": again == 0 and next_wait < 1,
        "all slots are free again": bed.all_free(total),
        "the daemon holds no locks": bed.nothing_locked(),
    }
    limit = TIMES.lookup_deadline + 1
    return Row(case, f"a miss; the next request does not ask ({next_wait:.2f} s)", waited, limit, checks, resumed)


def in_load(case: str, bed: Bed, *, kill: bool) -> Row:
    ids, _ = bed.stored()
    total = bed.free()
    request = bed.lab.request("load", ids)
    found = bed.lab.found(request)
    with frozen(bed.daemon):
        with later(0.3, lambda: send(bed.daemon, signal.SIGKILL) if kill else None):
            waited, slots = timed(lambda: bed.lab.load(request))
        aside = total - bed.free() if not kill else LENGTH
    resumed = bed.resumed()
    checks = {
        "it was found": found == LENGTH,
        "it was not loaded": slots is None,
        "its slots were set aside": aside == LENGTH,
        "all slots are free again": bed.all_free(total),
        "the daemon holds no locks": bed.nothing_locked(),
    }
    now = "recomputed; " + ("slots free once it is seen dead" if kill else "slots set aside until it has answered")
    return Row(case, now, waited, TIMES.load_deadline + 1, checks, resumed)


def in_store(case: str, bed: Bed, *, kill: bool) -> Row:
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
    checks = {
        "its tokens could be evicted": evicted,
        "what was stored late is not returned": not wrong,
        "all slots are free again": bed.all_free(total),
        "the daemon holds no locks": bed.nothing_locked(),
    }
    now = "its tokens can be evicted; what it stores late is refused"
    return Row(case, now, waited, TIMES.store_deadline + 1, checks, resumed)


def slow(case: str, bed: Bed) -> Row:
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
    checks = {
        "it was found": found == LENGTH,
        "it was not loaded": slots is None,
        "the late load was written": not same(rows(bench.pool, aside.nonzero().flatten()), before),
        "another request's slots are untouched": same(rows(bench.pool, others), theirs),
    }
    bench.allocator.free(others)
    resumed = bed.resumed()
    checks |= {"all slots are free again": bed.all_free(total), "the daemon holds no locks": bed.nothing_locked()}
    now = "recomputed; the late write hit slots set aside only, another request's were untouched"
    return Row(case, now, waited, TIMES.load_deadline + 1, checks, resumed)


def restarted(case: str, bed: Bed) -> Row:
    ids, _ = bed.stored()
    total, starts = bed.free(), bed.daemon.starts
    send(bed.daemon, signal.SIGTERM)
    wait_until(lambda: not bed.lab.connector.online, 60, "the loss is noticed")
    waited, found = timed(lambda: bed.lab.found(bed.lab.request("meanwhile", ids)))
    resumed = bed.resumed()
    checks = {
        "a miss": found == 0,
        "it was started again": bed.daemon.starts > starts,
        "all slots are free again": bed.all_free(total),
    }
    return Row(case, "not asked while it is away; registered again", waited, 1.0, checks, resumed)


def redis_lost(case: str, bed: Bed, redis: Redis) -> Row:
    ids, _ = _in_redis(bed, redis)
    _forget(bed)
    redis.kill()
    waited, found = timed(lambda: bed.lab.found(bed.lab.request("no redis", ids)))
    bed.lab.connector.finish_request("no redis")
    redis.start()
    started = time.monotonic()
    _in_redis(bed, redis)
    resumed = time.monotonic() - started
    checks = {"a miss": found == 0, "the daemon holds no locks": bed.nothing_locked()}
    now = "misses; written to again by the same daemon"
    return Row(case, now, waited, TIMES.lookup_deadline + 1, checks, resumed)


def redis_values(case: str, bed: Bed, redis: Redis, *, cut: bool) -> Row:
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
    checks = {"nothing of it is used": slots is None, "all slots are free again": bed.all_free(total)}
    limit = TIMES.lookup_deadline + TIMES.load_deadline + 1
    return Row(case, f"{'refused' if found else 'not found'}, recomputed", waited, limit, checks)


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


def no_daemon(case: str, folder: Path, checkpoint: Path) -> Row:
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
    return Row(case, now, waited, 1.0, {"a miss": found == 0, "no daemon is in use": not online}, resumed)


def other_weights(case: str, running: Daemon, folder: Path) -> Row:
    settings = replace(TIMES, port=port_of(running))
    with lab(settings, write_tiny_checkpoint(folder / "same", seed=1)) as bench:
        ids, held = Bed(bench, running).stored()
        known = Bed(bench, running).hit(ids, held)
    write_tiny_checkpoint(folder / "other", seed=2)
    for file in (folder / "other").iterdir():
        file.replace(folder / "same" / file.name)
    with lab(settings, folder / "same") as bench:
        waited, found = timed(lambda: bench.found(bench.request("other", ids)))
    checks = {"the first weights hit": known, "the others miss": found == 0}
    return Row(case, "a miss: the key names the weights", waited, TIMES.lookup_deadline + 1, checks)


def other_chunks(case: str, running: Daemon, checkpoint: Path) -> Row:
    try:
        with lab(replace(TIMES, port=port_of(running), chunk_tokens=2 * CHUNK), checkpoint):
            message = ""
    except OffloadError as error:
        message = str(error)
    checks = {"the error names both sizes": str(CHUNK) in message and str(2 * CHUNK) in message}
    return Row(case, "the server does not start: the error names both", None, None, checks)


def full_shared_memory(case: str, checkpoint: Path) -> Row:
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
    checks = {"it does not start": done.returncode != 0, "the error says why": "/dev/shm" in text}
    return Row(case, now, None, None, checks)


# Rows that bring their own server and daemon, those of one daemon, of one server with it, and of one with a Redis, too.
ALONE = {
    "/dev/shm full": full_shared_memory,
    "no daemon at the start": no_daemon,
    "one of two ranks' daemons killed": one_of_two,
}
DAEMON = {
    "daemon with another chunk size": other_chunks,
    "other weights of the same shape under the same name": other_weights,
}
SERVER: dict[str, Callable[[str, Bed], Row]] = {
    "daemon frozen in a lookup": partial(in_lookup, kill=False),
    "daemon frozen in a load": partial(in_load, kill=False),
    "daemon frozen in a store": partial(in_store, kill=False),
    "slow daemon: load written after it was given up": slow,
    "daemon killed in a lookup": partial(in_lookup, kill=True),
    "daemon killed in a load": partial(in_load, kill=True),
    "daemon killed in a store": partial(in_store, kill=True),
    "daemon restarted": restarted,
}
REDIS: dict[str, Callable[[str, Bed, Redis], Row]] = {
    "Redis killed and restarted": redis_lost,
    "changed data in Redis": partial(redis_values, cut=False),
    "truncated data in Redis": partial(redis_values, cut=True),
}
CASES = (*ALONE, *DAEMON, *SERVER, *REDIS)


def seen(case: str, work: Callable[..., Row], *parts: Any) -> Row:
    """One row; what it could not go through with is a bad row, and the next ones are still tried."""
    try:
        return work(case, *parts)
    except (RuntimeError, AssertionError) as error:
        return Row(case, f"not seen to its end: {error}", None, None, {"seen to its end": False})


def measure(folder: Path, wanted: set[str]) -> Iterator[Row]:
    """The rows that are asked for, each as soon as it is known."""
    checkpoint = write_tiny_checkpoint(folder / "m3")
    for name in ("late", "plain", "redis"):
        (folder / name).mkdir()
    if "/dev/shm full" in wanted:
        yield seen("/dev/shm full", full_shared_memory, checkpoint)
    if "no daemon at the start" in wanted:
        yield seen("no daemon at the start", no_daemon, folder / "late", checkpoint)
    if "one of two ranks' daemons killed" in wanted:
        yield seen("one of two ranks' daemons killed", one_of_two, folder / "ranks", checkpoint)
    if wanted & {*DAEMON, *SERVER}:
        with daemon(folder / "plain", memory_gb=0.5) as running:
            for case, work in DAEMON.items():
                if case in wanted:
                    yield seen(case, work, running, checkpoint if work is other_chunks else folder)
            if wanted & set(SERVER):
                with lab(replace(TIMES, port=port_of(running)), checkpoint) as bench:
                    bed = Bed(bench, running)
                    for case in SERVER:
                        if case in wanted:
                            yield replace(seen(case, SERVER[case], bed), stores_failed=bed.stores_failed)
    if wanted & set(REDIS):
        redis = Redis(folder)
        redis.start()
        try:
            with (
                daemon(folder / "redis", memory_gb=0.5, l2=redis.url) as running,
                lab(replace(TIMES, port=port_of(running)), checkpoint) as bench,
            ):
                bed = Bed(bench, running)
                for case in REDIS:
                    if case in wanted:
                        yield seen(case, REDIS[case], bed, redis)
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
        "all_good": len(found) == len(CASES) and all(row.good for row in found),
        "rows": [asdict(row) | {"good": row.good} for row in found],
    }


def stored_rows(out: Path | None) -> dict[str, Row]:
    """What an earlier call has left in the file."""
    if out is None or not out.exists():
        return {}
    rows_ = json.loads(out.read_text())["rows"]
    return {row["case"]: Row(**{name: value for name, value in row.items() if name != "good"}) for row in rows_}


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="JSON; kept and added to.")
@click.option("--again", multiple=True, metavar="TEXT", help="Run rows anew whose name holds this.")
def main(out: Path | None, again: tuple[str, ...]) -> None:
    """Run the rows that FILE lacks; exit code 1 when one is wrong or waited longer than its deadline plus 1 s."""
    os.environ.setdefault("SGLANG_PLATFORM", "agentserve_cpu")
    found = stored_rows(out)
    wanted = {case for case in CASES if case not in found or any(text in case for text in again)}
    with tempfile.TemporaryDirectory(prefix="offload-faults-") as folder:
        for row in measure(Path(folder), wanted):
            found[row.case] = row
            click.echo(f"{'good' if row.good else 'BAD'}: {row}", err=True)
            if out is not None:  # after each row: a run of many minutes that is stopped leaves what it had
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report(ordered(found)), indent=1) + "\n")
    click.echo(markdown(ordered(found)))
    sys.exit(0 if all(row.good for row in found.values()) else 1)


def ordered(found: dict[str, Row]) -> list[Row]:
    return [found[case] for case in CASES if case in found]


if __name__ == "__main__":
    main()
