"""A real Redis behind a real daemon: what outlives the daemon, and what a Redis that goes away or is damaged does."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from agentserve.runtime.request_facts import BOOK
from eval.bench.offload_rig import Redis
from offload.daemon import DaemonSpec, RedisClient
from offload.settings import OffloadSettings
from tests.offload_lab import CHUNK, Lab, fill, lab, put, rows, same, slack, tokens_of, wait_until

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="no redis-server here: apt-get install redis-server"
    ),
]

TIMES = OffloadSettings(lookup_deadline=3.0, load_deadline=3.0, store_deadline=5.0, ping_interval=0.5)


@pytest.fixture(scope="module", name="redis")
def _redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    redis = Redis(tmp_path_factory.mktemp("redis"))
    redis.start()
    yield redis
    redis.kill()


@contextmanager
def served(redis: Redis, client: RedisClient, checkpoint: Path, folder: Path) -> Iterator[tuple[Daemon, Lab]]:
    spec = DaemonSpec(
        "127.0.0.1", free_port(), free_port(), CHUNK, 0.5, l2=f"redis://127.0.0.1:{redis.port}", redis_client=client
    )
    with (
        Daemon(daemon_plan(spec, folder), folder / f"{client}.log") as daemon,
        lab(replace(TIMES, port=spec.port, tiers="told"), checkpoint) as bench,
    ):
        yield daemon, bench


def stored(bench: Lab, redis: Redis) -> tuple[list[int], list[Any]]:
    """A new prompt whose state is in Redis, and what its slots held."""
    deadline = time.monotonic() + 90
    while True:
        ids = tokens_of(time.monotonic_ns(), 1024)
        slots = bench.take(1024)
        held = rows(bench.pool, slots)
        before = redis.keys()
        assert bench.store(f"store-{ids[:4]}", ids, slots)
        try:
            wait_until(lambda before=before: redis.keys() == before + 4, 10)
        except AssertionError:
            # A daemon whose client is about to reconnect keeps the state in memory only and does not try again.
            if time.monotonic() > deadline:
                raise
            continue
        finally:
            bench.allocator.free(slots)
        fill(bench.pool, 99)
        return ids, list(held)


def restored_from_storage(bench: Lab, name: str, ids: list[int], held: list[Any]) -> int:
    """Tokens of a restored prompt that came from Redis, by the daemon's word; all of it is what was stored."""
    request = bench.request(name, ids)
    assert bench.found(request) == 1024
    slots = bench.load(request)
    assert slots is not None
    assert same(rows(bench.pool, slots), held)
    bench.allocator.free(slots)
    return BOOK.of(name)["from_storage"]


def lose_memory(daemon: Daemon, bench: Lab) -> None:
    """Restart the daemon: what it had in memory is gone."""
    starts = daemon.starts
    os.kill(daemon.pid or 0, signal.SIGKILL)
    wait_until(lambda: not bench.connector.online, 30)
    wait_until(lambda: bench.connector.online and daemon.starts > starts, 180)


def timed_lookup(bench: Lab, name: str, ids: list[int]) -> int:
    """Tokens found, within the deadline."""
    started = time.monotonic()
    found = bench.found(bench.request(name, ids))
    assert time.monotonic() - started < TIMES.lookup_deadline + slack()
    return found


def test_valkey_outlives_the_daemon_and_a_redis_that_was_away(
    redis: Redis, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with served(redis, "valkey", tiny_checkpoint, tmp_path) as (daemon, bench):
        ids, held = stored(bench, redis)
        assert restored_from_storage(bench, "from memory", ids, held) == 0
        cut, _ = stored(bench, redis)
        lose_memory(daemon, bench)
        assert restored_from_storage(bench, "from redis only", ids, held) == 1024
        bench.cache.check_hicache_events()
        half = bench.take(512)
        put(bench.pool, half, [plane[:512] for plane in held])
        assert bench.store("half", ids[:512], half)
        assert restored_from_storage(bench, "half from redis", ids, held) == 512

        redis.kill()
        assert timed_lookup(bench, "without redis", cut) == 0
        redis.start()  # empty
        bench.connector.finish_request("without redis")
        wait_until(lambda: bench.connector.online, 60)
        ids, held = stored(bench, redis)  # it is used again, by the same daemon
        assert daemon.starts == 2

        # Damaged and shortened values: refused or not found, never returned.
        redis.damage_values()
        lose_memory(daemon, bench)
        request = bench.request("damaged", ids)
        assert bench.found(request) == 1024
        assert bench.load(request) is None
        bench.cache.check_hicache_events()
        redis.cut_values()
        lose_memory(daemon, bench)
        request = bench.request("cut", ids)
        if bench.found(request):
            assert bench.load(request) is None


def test_resp_does_not_come_back_after_redis_was_away(redis: Redis, tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Why valkey is the default. When this fails, LMCache's other client has learned to reconnect: measure again."""
    with served(redis, "resp", tiny_checkpoint, tmp_path) as (_, bench):
        stored(bench, redis)
        redis.kill()
        redis.start()
        ids = tokens_of(time.monotonic_ns(), 1024)
        bench.store("after", ids, bench.take(1024))
        time.sleep(3)
        assert redis.keys() == 0
