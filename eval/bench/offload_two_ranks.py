"""Two tensor-parallel ranks with a daemon each, one of which is killed: a row of ``eval.bench.offload_faults``.

Each rank is a process with SGLang's cache and allocator, an M3 KV pool and the real connector; they agree as the ranks
of a server do.
"""

from __future__ import annotations

import signal
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from agentserve.launch.host import free_port
from eval.bench.offload_bed import LENGTH, RESUME_S, TIMES, Row
from eval.bench.offload_rig import daemon, port_of, send, wait_until
from offload.settings import OffloadSettings

STARTUP_S = 240.0


def rank_main(rank: int, meeting: int, settings: OffloadSettings, checkpoint: Path, pipe: Connection) -> None:
    """What one rank goes through; it says when the other's daemon may be killed, and what it saw."""
    try:
        import torch

        from tests.offload_lab import lab

        torch.distributed.init_process_group(
            "gloo", f"tcp://127.0.0.1:{meeting}", timedelta(seconds=STARTUP_S), rank=rank, world_size=2
        )
        with lab(settings, checkpoint, seed=rank, tp_rank=rank, tp_size=2) as engine:
            pipe.send(lost_and_found(engine, pipe))
    except BaseException:  # told to whoever waits at the other end
        pipe.send(traceback.format_exc())


def lost_and_found(engine: Any, pipe: Connection) -> dict[str, Any]:
    """All ranks take the same steps, as schedulers do."""
    import torch

    from tests.offload_lab import fill, rows, same, tokens_of

    slots = engine.take(LENGTH)

    def store(number: int) -> tuple[list[int], list[torch.Tensor]]:
        ids = tokens_of(number, LENGTH)
        fill(engine.pool, number)
        held = rows(engine.pool, slots)
        operation = engine.connector.submit_store(
            f"store-{number}", ids, [slots], device_indices_start=0, cache_salt=""
        )
        if operation is not None:
            wait_until(lambda: engine.connector.ready_prefix_count([operation]) == 1, 60, "the store is over")
            engine.connector.complete_store(operation)
        engine.connector.finish_request(f"store-{number}")
        return ids, held

    def hit(number: int, ids: list[int], held: list[torch.Tensor]) -> bool:
        request = engine.request(f"hit-{number}", ids)
        got = engine.load(request) if engine.found(request) == LENGTH else None
        good = got is not None and same(rows(engine.pool, got), held)
        if got is not None:
            engine.allocator.free(got)
        return good

    wait_until(engine.connector.all_online, STARTUP_S, "both daemons are used")
    ids, held = store(1)
    known = hit(1, ids, held)
    request = engine.request("lost", ids)
    found = engine.found(request)
    total = engine.allocator.available_size()
    pipe.send("kill")
    pipe.recv()
    started = time.monotonic()
    loaded = engine.load(request)
    waited = time.monotonic() - started
    next_started = time.monotonic()
    missed = engine.found(engine.request("next", ids)) == 0
    next_s = time.monotonic() - next_started
    back = time.monotonic()
    number = 2
    while True:
        wait_until(engine.connector.all_online, RESUME_S, "both daemons are used again")
        if hit(number, *store(number)):
            break
        number += 1
    resumed = time.monotonic() - back
    end = time.monotonic() + 60
    while engine.connector.ready_prefix_count([]) or len(engine.cache._quarantine):  # ranks free what all may free
        engine.cache.check_hicache_events()
        if time.monotonic() > end:
            break
    return {
        "waited": waited,
        "resumed": resumed,
        "checks": {
            "both hit before": known and found == LENGTH,
            "it was not loaded": loaded is None,
            "the next request does not ask": missed and next_s < 1,
            "all slots are free again": engine.allocator.available_size() == total,
        },
    }


def one_of_two(case: str, folder: Path, checkpoint: Path) -> Row:
    """Kill the second rank's daemon between a lookup and its load. Raises RuntimeError when a rank fails."""
    for name in ("0", "1"):
        (folder / name).mkdir(parents=True)
    context = get_context("spawn")
    with ExitStack() as stack:
        running = [stack.enter_context(daemon(folder / name, memory_gb=0.5)) for name in ("0", "1")]
        addresses = tuple(f"127.0.0.1:{port_of(one)}" for one in running)
        settings = replace(TIMES, port=port_of(running[0]), rank_addresses=addresses)
        meeting, pipes = free_port(), []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, meeting, settings, checkpoint, theirs))
            process.start()
            stack.callback(process.kill)
            stack.callback(process.join, 20)  # first
            pipes.append(ours)
        told = [_told(pipe) for pipe in pipes]
        if told != ["kill", "kill"]:
            raise RuntimeError(str(next(text for text in told if text != "kill")))
        send(running[1], signal.SIGKILL)
        for pipe in pipes:
            pipe.send("killed")
        seen = [_told(pipe) for pipe in pipes]
        broken = next((text for text in seen if isinstance(text, str)), None)
        if broken is not None:
            raise RuntimeError(broken)
    checks = {name: all(one["checks"][name] for one in seen) for name in seen[0]["checks"]}
    return Row(
        case,
        "both ranks recompute, and do not ask again until it is back; then both hit again",
        max(one["waited"] for one in seen),
        TIMES.load_deadline + 1,
        checks,
        max(one["resumed"] for one in seen),
    )


def _told(pipe: Connection) -> Any:
    return pipe.recv() if pipe.poll(STARTUP_S + RESUME_S) else "a rank did not answer"
