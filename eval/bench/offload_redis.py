"""LMCache's two Redis clients side by side: ``python -m eval.bench.offload_redis`` prints one JSON object.

A daemon with ``resp`` and one with ``valkey``, each with a Redis of its own, and the real connector over an M3 KV pool
take turns. A round stores a new prompt until Redis has all of it, empties the daemon's memory and restores it from
Redis alone, bit for bit. Then both Redis are killed and started again: how long a lookup takes meanwhile, and whether
the client writes again. Plain writes and reads of as many bytes by one client show what this Redis and machine give.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import httpx

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.launch.daemon import Daemon
from eval.bench.offload_bed import TIMES
from eval.bench.offload_rig import CHUNK, Redis, daemon, port_of, wait_until
from offload.daemon import RedisClient
from tests.offload_lab import Lab, fill, lab, rows, same, tokens_of

CLIENTS: tuple[RedisClient, ...] = ("resp", "valkey")
AWAY_S = 3.0
AGAIN_S = 30.0


class Side:
    """One client with its daemon, its Redis and its engine."""

    def __init__(self, redis: Redis, running: Daemon, engine: Lab, tokens: int) -> None:
        self.redis, self.daemon, self.lab, self.tokens = redis, running, engine, tokens
        self.seconds: dict[str, list[float]] = {"store": [], "lookup": [], "load": []}
        self.bytes = 0
        self.exact = True
        self._seed = time.monotonic_ns()

    def store(self, *, wait_s: float) -> tuple[list[int], list[Any]] | None:
        """A new prompt in Redis and what its slots held; None when Redis did not get it in time."""
        self._seed += 1
        ids = tokens_of(self._seed, self.tokens)
        slots = self.lab.take(self.tokens)
        try:
            held = rows(self.lab.pool, slots)
            before = self.redis.keys()
            started = time.monotonic()
            if not self.lab.store(f"store-{self._seed}", ids, slots, wait_s=60):
                return None
            try:
                wait_until(lambda: self.redis.keys() >= before + self.tokens // CHUNK, wait_s, "Redis has it")
            except RuntimeError:
                return None
            self.seconds["store"].append(time.monotonic() - started)
            return ids, held
        finally:
            self.lab.allocator.free(slots)

    def round(self) -> None:
        """Store, forget, restore from Redis alone."""
        stored = self.store(wait_s=60)
        if stored is None:
            raise RuntimeError("a healthy Redis did not get what was stored")
        ids, held = stored
        self.bytes = self.redis.value_bytes() // (self.redis.keys() * CHUNK // self.tokens)
        kept = self.redis.keys()
        httpx.post(f"{self.daemon.plan.url}/cache/clear", timeout=30, trust_env=False).raise_for_status()
        if self.redis.keys() != kept:
            raise RuntimeError("emptying the daemon's memory emptied Redis too: nothing can be measured")
        fill(self.lab.pool, self._seed % 1000)
        request = self.lab.request(f"restore-{self._seed}", ids)
        started = time.monotonic()
        found = self.lab.found(request)
        looked_up = time.monotonic()
        slots = self.lab.load(request) if found == self.tokens else None
        self.seconds["lookup"].append(looked_up - started)
        self.seconds["load"].append(time.monotonic() - looked_up)
        self.exact = self.exact and slots is not None and same(rows(self.lab.pool, slots), held)
        if slots is not None:
            self.lab.allocator.free(slots)

    def lose_redis(self) -> dict[str, Any]:
        """Kill Redis, ask, start it again: the lookup's seconds, and those until a store arrives (None: never)."""
        self.redis.kill()
        asked = time.monotonic()
        found = self.lab.found(self.lab.request("away", tokens_of(self._seed + 1, self.tokens)))
        waited = time.monotonic() - asked
        self.lab.connector.finish_request("away")
        time.sleep(AWAY_S)
        self.redis.start()
        started = time.monotonic()
        again: float | None = None
        while again is None and time.monotonic() - started < AGAIN_S:
            if self.lab.connector.online and self.store(wait_s=5) is not None:
                again = time.monotonic() - started
        return {
            "lookup_seconds_without_redis": round(waited, 3),
            "found_without_redis": found,
            "writes_again_after_s": None if again is None else round(again, 1),
        }

    def report(self) -> dict[str, Any]:
        medians = {name: statistics.median(values) for name, values in self.seconds.items() if values}
        restore = medians["lookup"] + medians["load"]
        return {
            "bytes": self.bytes,
            "seconds": {name: [round(value, 4) for value in values] for name, values in self.seconds.items()},
            "store_mb_per_s": round(self.bytes / medians["store"] / 1e6, 1),
            "restore_mb_per_s": round(self.bytes / restore / 1e6, 1),
            "restored_bit_for_bit": self.exact,
        }


def plain(redis: Redis, size: int, pieces: int) -> dict[str, float]:
    """MB/s of SET and GET of ``size`` bytes in ``pieces``, one after the other, through one socket."""
    piece = os.urandom(size // pieces)
    with (
        socket.create_connection(("127.0.0.1", redis.port), timeout=60) as connection,
        connection.makefile("rb") as reply,
    ):
        started = time.monotonic()
        for number in range(pieces):
            key = b"plain-%d" % number
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(piece))
            connection.sendall(head + piece + b"\r\n")
            reply.readline()
        written = time.monotonic()
        for number in range(pieces):
            key = b"plain-%d" % number
            connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key))
            reply.read(int(reply.readline()[1:]) + 2)
        read = time.monotonic()
        for number in range(pieces):
            key = b"plain-%d" % number
            connection.sendall(b"*2\r\n$3\r\nDEL\r\n$%d\r\n%s\r\n" % (len(key), key))
            reply.readline()
    megabytes = len(piece) * pieces / 1e6
    return {
        "set_mb_per_s": round(megabytes / (written - started), 1),
        "get_mb_per_s": round(megabytes / (read - written), 1),
    }


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=7)
@click.option("--tokens", default=4096, help="Of a prompt; whole chunks of 256.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here too.")
def main(rounds: int, tokens: int, out: Path | None) -> None:
    """Measure both; exit code 1 when something restored is not what was stored."""
    if tokens < CHUNK or tokens % CHUNK:
        raise click.BadParameter(f"--tokens {tokens} is not a multiple of {CHUNK}")
    os.environ.setdefault("SGLANG_PLATFORM", "agentserve_cpu")
    with tempfile.TemporaryDirectory(prefix="offload-redis-") as name, ExitStack() as stack:
        folder = Path(name)
        checkpoint = write_tiny_checkpoint(folder / "m3")
        sides: dict[str, Side] = {}
        for client in CLIENTS:
            (folder / client).mkdir()
            redis = Redis(folder / client)
            redis.start()
            stack.callback(redis.kill)
            running = stack.enter_context(daemon(folder / client, memory_gb=0.5, l2=redis.url, client=client))
            # Long ones: what is timed here shall end by itself.
            times = replace(TIMES, port=port_of(running), lookup_deadline=20.0, load_deadline=20.0, store_deadline=30.0)
            engine = stack.enter_context(lab(times, checkpoint, size=2 * tokens))
            sides[client] = Side(redis, running, engine, tokens)
        for number in range(rounds + 1):
            for side in sides.values():
                side.round()
                if number == 0:  # connections and memory are made in the first
                    side.seconds = {name: [] for name in side.seconds}
        speeds = {client: side.report() for client, side in sides.items()}
        bytes_moved = sides["valkey"].bytes
        raw = plain(sides["valkey"].redis, bytes_moved, tokens // CHUNK)
        lost = {client: side.lose_redis() for client, side in sides.items()}
    result: dict[str, Any] = {
        "command": f"python -m eval.bench.offload_redis --rounds {rounds} --tokens {tokens}",
        "tokens": tokens,
        "plain_redis": raw,
        "resp": speeds["resp"] | lost["resp"],
        "valkey": speeds["valkey"] | lost["valkey"],
        "valkey_over_resp_store_speed": round(speeds["valkey"]["store_mb_per_s"] / speeds["resp"]["store_mb_per_s"], 2),
        "valkey_over_resp_restore_speed": round(
            speeds["valkey"]["restore_mb_per_s"] / speeds["resp"]["restore_mb_per_s"], 2
        ),
    }
    text = json.dumps(result, indent=1)
    click.echo(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    sys.exit(0 if all(side.exact for side in sides.values()) else 1)


if __name__ == "__main__":
    main()
