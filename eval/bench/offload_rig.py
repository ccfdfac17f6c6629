"""What the offload benchmarks break: a Redis, a daemon that is watched, and ways to freeze, slow or kill a process."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from offload.daemon import DaemonSpec, RedisClient
from offload.segments import SHM

CHUNK = 256
# How often each is drawn. A killed daemon is away for the time that its start takes, so that one is rarer.
FAULTS = {"daemon frozen": 4, "daemon slow": 3, "redis killed": 3, "daemon killed": 1}


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> float:
    """Seconds that it took. Raises RuntimeError when it is not so after ``seconds``."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > seconds:
            raise RuntimeError(f"{what}: not so after {seconds:g} s")
        time.sleep(0.01)
    return time.monotonic() - started


class Redis:
    """A Redis on a free port that keeps nothing on disk, spoken to in its own protocol.

    Raises:
        RuntimeError: there is no ``redis-server``.
    """

    def __init__(self, folder: Path) -> None:
        if shutil.which("redis-server") is None:
            raise RuntimeError("no redis-server here: apt-get install redis-server")
        self.port = free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            ["redis-server", *options], cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self.answers, 60, "redis answers")

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def answers(self) -> bool:
        with suppress(OSError):
            return self.ask("PING") == b"+PONG"
        return False

    def ask(self, *words: str) -> bytes:
        """One command; the first line of the reply, or the value of a bulk string."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            parts = [f"*{len(words)}\r\n", *(f"${len(word)}\r\n{word}\r\n" for word in words)]
            connection.sendall("".join(parts).encode())
            with connection.makefile("rb") as reply:
                line = reply.readline().rstrip()
                return reply.read(int(line[1:])) if line[:1] == b"$" else line

    def keys(self) -> int:
        return int(self.ask("DBSIZE")[1:])

    def value_bytes(self) -> int:
        """Bytes of all values together."""
        return self._each("sum = sum + redis.call('STRLEN', key)")

    def cut_values(self) -> None:
        """Make every value half as long."""
        self._each("local v = redis.call('GET', key) redis.call('SET', key, string.sub(v, 1, #v / 2))")

    def damage_values(self) -> None:
        """Change two bytes in the middle of every value."""
        middle = "math.floor(redis.call('STRLEN', key) / 2)"
        self._each(f"redis.call('SETRANGE', key, {middle}, 'xy')")

    def _each(self, statement: str) -> int:
        """Run a Lua statement for every ``key``; returns its ``sum``. Raises RuntimeError where Redis refuses it."""
        script = f"local sum = 0 for _, key in ipairs(redis.call('KEYS', '*')) do {statement} end return sum"
        reply = self.ask("EVAL", script, "0")
        if reply[:1] != b":":
            raise RuntimeError(f"redis: {reply.decode(errors='replace')}")
        return int(reply[1:])


@contextmanager
def daemon(
    folder: Path, *, memory_gb: float = 1.0, l2: str | None = None, client: RedisClient = "valkey",
    frozen_after_s: float = 600.0, port: int | None = None,
) -> Iterator[Daemon]:  # fmt: skip
    """A daemon that is started again when it ends, on a free port unless one is given; to freeze it is the caller's."""
    spec = DaemonSpec("127.0.0.1", port or free_port(), free_port(), CHUNK, memory_gb, l2=l2, redis_client=client)
    with Daemon(daemon_plan(spec, folder), folder / "lmcache.log", frozen_after_s=frozen_after_s) as running:
        yield running


def port_of(running: Daemon) -> int:
    """Of its requests."""
    return int(running.plan.argv[running.plan.argv.index("--port") + 1])


def send(running: Daemon, number: signal.Signals) -> None:
    """A signal to the daemon, where it runs at the moment."""
    pid = running.pid
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@contextmanager
def frozen(running: Daemon) -> Iterator[None]:
    send(running, signal.SIGSTOP)
    try:
        yield
    finally:
        send(running, signal.SIGCONT)


def crawl(running: Daemon, seconds: float, *, stop_s: float = 0.2, run_s: float = 0.02) -> None:
    """Let it run a tenth of the time only, for ``seconds``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with frozen(running):
            time.sleep(stop_s)
        time.sleep(run_s)


class Faults(threading.Thread):
    """Breaks things for ``seconds``, and leaves everything running then."""

    def __init__(self, seed: int, running: Daemon, redis: Redis, seconds: float) -> None:
        super().__init__(name="faults", daemon=True)
        self._until = time.monotonic() + seconds
        self._rng = random.Random(seed)
        self._daemon, self._redis = running, redis
        self._end = threading.Event()
        self.done: Counter[str] = Counter()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._end.wait(self._rng.uniform(2, 12)) and time.monotonic() < self._until:
                kind = self._rng.choices(list(FAULTS), list(FAULTS.values()))[0]
                self._inject(kind, self._rng.uniform(0.5, 6))
                self.done[kind] += 1
        except BaseException as error:  # told to whoever waits for this thread
            self.failure = error

    def _inject(self, kind: str, seconds: float) -> None:
        if kind == "daemon killed":
            send(self._daemon, signal.SIGKILL)
        elif kind == "daemon frozen":
            with frozen(self._daemon):
                self._end.wait(seconds)
        elif kind == "daemon slow":
            crawl(self._daemon, seconds)
        else:
            self._redis.kill()
            self._end.wait(seconds)
            self._redis.start()

    def stop(self) -> None:
        self._end.set()
        self.join()
        if self.failure is not None:
            raise self.failure


def locks(running: Daemon) -> dict[str, int]:
    """Locks, sessions and lookups that the daemon holds for its servers, from its own status."""
    storage = httpx.get(f"{running.plan.url}/status", timeout=30, trust_env=False).json()
    found = {"sessions": int(storage["active_sessions"]), "lookups": int(storage["active_prefetch_jobs"])}
    for name in ("read_locked_count", "write_locked_count"):
        found[name] = sum(_numbers(storage, name))
    return found


def _numbers(value: object, name: str) -> Iterator[int]:
    """Every number called ``name`` in nested dicts and lists."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == name and isinstance(inner, int):
                yield inner
            else:
                yield from _numbers(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, name)


def segments(pids: set[int], folder: Path = SHM) -> int:
    """Files of LMCache in ``/dev/shm`` that belong to the processes, or to none that runs."""
    names = [path.name for path in folder.glob("lmcache_*")]
    return sum(1 for name in names if _owner(name) in pids or not _alive(_owner(name)))


def _owner(name: str) -> int:
    numbers = [int(part) for part in name.split("_") if part.isdigit()]
    return numbers[0] if numbers else 0


def _alive(pid: int) -> bool:
    return pid == 0 or Path(f"/proc/{pid}").exists()


def descriptors(pids: set[int]) -> dict[int, int]:
    """Open file descriptors of each process that still runs."""
    found = {}
    for pid in sorted(pids):
        with suppress(OSError):
            found[pid] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return found
