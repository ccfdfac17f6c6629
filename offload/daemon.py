"""The command that starts LMCache's daemon, as a pure function of what it shall hold and where it listens."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import orjson

from offload.settings import OffloadError

RedisClient = Literal["resp", "valkey"]


class DaemonSpec(NamedTuple):
    """One ``lmcache server``."""

    host: str
    port: int  # requests (ZMQ)
    http_port: int  # health, status, metrics; loopback only: it has no authentication
    chunk_tokens: int
    memory_gb: float  # its own tier, in host memory
    workers: int = 1  # ranks whose copies run at once
    l2: str | None = None  # redis://[user:password@]host:port
    redis_client: RedisClient = "valkey"
    redis_timeout_s: float = 0.25  # of a valkey request, one a chunk; after it the chunk is missed


def daemon_command(spec: DaemonSpec, program: str | None = None) -> list[str]:
    """Program and arguments.

    Raises:
        OffloadError: LMCache is not installed, or ``l2`` is no address of a Redis.
    """
    argv = [
        program or lmcache_program(),
        "server",
        "--host",
        spec.host,
        "--port",
        str(spec.port),
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(spec.http_port),
        "--chunk-size",
        str(spec.chunk_tokens),
        "--l1-size-gb",
        f"{spec.memory_gb:g}",
        # Grown from 1 GB on a GPU machine, so that starting does not pin all of it; whole gigabytes only.
        *(("--l1-init-size-gb", "1") if spec.memory_gb > 1 else ()),
        "--eviction-policy",
        "LRU",
        "--max-gpu-workers",
        str(spec.workers),
        # Signs of life share these with lookups; with one worker a slow lookup looks like a dead daemon.
        "--max-cpu-workers",
        "4",
        # Registrations of servers that were killed, and their mappings of shared memory, go after this silence.
        "--worker-reap-timeout-seconds",
        "60",
    ]
    if spec.l2 is None:
        return [*argv, "--disable-observability"]
    # Of all that observability brings we want the one event that says where a lookup found what.
    module = {"module_path": "offload.lmcache_tiers"}
    argv += ["--disable-metrics", "--disable-logging", "--server-module", orjson.dumps(module).decode()]
    return [
        *argv,
        "--l2-adapter",
        orjson.dumps(redis_adapter(spec.l2, spec.redis_client, spec.redis_timeout_s)).decode(),
    ]


def redis_adapter(url: str, client: RedisClient, timeout_s: float = 0.25) -> dict[str, object]:
    """LMCache's adapter for ``redis://[user:password@]host:port``. Raises OffloadError for anything else."""
    parts = urlsplit(url)
    try:
        port = parts.port or 6379
    except ValueError:
        port = 0
    if parts.scheme != "redis" or not parts.hostname or not port or parts.path.strip("/") or parts.query:
        raise OffloadError(f"offload.l2 {url!r}: write it as redis://host:port, or redis://user:password@host:port")
    login = {}
    if parts.password:
        login = {"username": unquote(parts.username or "default"), "password": unquote(parts.password)}
    if client == "resp":
        return {"type": "resp", "host": parts.hostname, "port": port, **login}
    # The default of 5 s blocks lookups for as long as a Redis is away, several times over. The wait for the first
    # connections stays LMCache's 10 s: they are made while the daemon still loads, and without them it ends.
    return {
        "type": "valkey",
        "startup_nodes": f"{parts.hostname}:{port}",
        "request_timeout": timeout_s,
        **login,
    }


def lmcache_program() -> str:
    """The program ``lmcache`` of this Python, or on the path. Raises OffloadError."""
    beside = Path(sys.executable).with_name("lmcache")
    found = str(beside) if beside.exists() else shutil.which("lmcache")
    if found is None:
        raise OffloadError("LMCache is not installed: `pip install 'agentserve[lmcache]'`, see the README")
    return found
