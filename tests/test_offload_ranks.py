"""Two tensor-parallel ranks with one daemon: what one cannot restore neither uses, and neither waits for the other."""

from __future__ import annotations

import os
import signal
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from offload.daemon import DaemonSpec
from offload.settings import OffloadSettings

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TIMES = OffloadSettings(lookup_deadline=3.0, load_deadline=3.0, store_deadline=3.0, ping_interval=0.5)


def rank_main(
    rank: int, store_port: int, settings: OffloadSettings, checkpoint: Path, daemon: int, pipe: Connection
) -> None:
    try:
        pipe.send(run_rank(rank, store_port, settings, checkpoint, daemon))
    except BaseException:
        pipe.send(traceback.format_exc())


def run_rank(rank: int, store_port: int, settings: OffloadSettings, checkpoint: Path, daemon: int) -> dict[str, Any]:
    """The same steps on both ranks, as schedulers do; what this rank saw."""
    import torch

    from tests.offload_lab import Lab, fill, rows, same, slack, tokens_of, wait_until

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{store_port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    lab = Lab(settings, checkpoint, seed=rank, tp_rank=rank, tp_size=2)
    seen: dict[str, Any] = {"name": lab.connector.model_name}
    wait_until(lab.connector.all_online, 60)
    ids = tokens_of(store_port, 1024)
    slots = lab.take(1024)
    held = rows(lab.pool, slots)
    operation = lab.connector.submit_store("store", ids, [slots], device_indices_start=0, cache_salt="")
    wait_until(lambda: lab.connector.ready_prefix_count([operation]) == 1, 30)
    seen["stored"] = lab.connector.complete_store(operation)
    lab.connector.finish_request("store")
    lab.allocator.free(slots)
    total = lab.allocator.available_size()

    def restore(name: str) -> Any:
        request = lab.request(name, ids)
        found = lab.found(request)
        fill(lab.pool, 50 + rank)
        started = time.monotonic()
        got = lab.load(request) if found else None
        return found, got, time.monotonic() - started

    found, got, _ = restore("both")
    seen["both"] = (found, got is not None and same(rows(lab.pool, got), held))

    # The daemon freezes between lookup and load.
    request = lab.request("frozen", ids)
    seen["frozen found"] = lab.found(request)
    torch.distributed.barrier()
    if rank == 0:
        os.kill(daemon, signal.SIGSTOP)
    torch.distributed.barrier()
    started = time.monotonic()
    seen["frozen load"] = lab.load(request)
    seen["frozen seconds"], seen["slack"] = time.monotonic() - started, slack()
    seen["frozen offline"] = lab.connector.all_online()
    lab.cache.check_hicache_events()
    seen["frozen free"] = lab.allocator.available_size() - total
    torch.distributed.barrier()
    if rank == 0:
        os.kill(daemon, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while lab.connector.ready_prefix_count([]) or len(lab.cache._quarantine):
        lab.cache.check_hicache_events()
        assert time.monotonic() < deadline
    seen["thawed free"] = lab.allocator.available_size() - total
    wait_until(lab.connector.all_online, 60)
    found, got, _ = restore("after")
    seen["after"] = (found, got is not None and same(rows(lab.pool, got), held))

    # Rank 1 loses its index keys on the way: both recompute.
    wait_for = lab.connector._wait_for

    def lossy(operation: Any, *rest: Any) -> bool:
        done = bool(wait_for(operation, *rest))
        lab.pool.index_k_pool.k_buffer[0][operation.device_indices] = 0
        return done

    if rank == 1:
        lab.connector._wait_for = lossy
    found, got, _ = restore("one lossy")
    seen["one lossy"] = (found, got)
    lab.connector._wait_for = wait_for
    lab.connector.finish_request("one lossy")
    seen["then"] = lab.found(lab.request("then", ids))
    lab.close()
    return seen


def test_two_ranks_agree_on_every_outcome(tiny_checkpoint: Path, tmp_path: Path) -> None:
    spec = DaemonSpec("127.0.0.1", free_port(), free_port(), 256, 0.5, workers=2)
    settings = replace(TIMES, port=spec.port)
    context = get_context("spawn")
    with Daemon(daemon_plan(spec, tmp_path), tmp_path / "lmcache.log", frozen_after_s=600) as daemon:
        store_port = free_port()
        pipes, processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main, args=(rank, store_port, settings, tiny_checkpoint, daemon.pid, theirs)
            )
            process.start()
            pipes.append(ours)
            processes.append(process)
        try:
            results = [pipe.recv() if pipe.poll(600) else "no answer" for pipe in pipes]
        finally:
            os.kill(daemon.pid or 0, signal.SIGCONT)
            for process in processes:
                process.join(20)
                if process.is_alive():
                    process.kill()
    for seen in results:
        assert isinstance(seen, dict), seen
        assert seen["stored"]
        assert seen["both"] == (1024, True)
        assert seen["frozen found"] == 1024
        assert seen["frozen load"] is None
        assert seen["frozen seconds"] < TIMES.load_deadline + seen["slack"]
        assert not seen["frozen offline"]
        assert (seen["frozen free"], seen["thawed free"]) == (-2048, -1024)  # what "both" took stays taken
        assert seen["after"] == (1024, True)
        assert seen["one lossy"] == (1024, None)
        assert seen["then"] == 0
    assert results[0]["name"] == results[1]["name"]
