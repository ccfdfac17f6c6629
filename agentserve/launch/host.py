"""Facts of this machine that decide whether a server can start. Nothing here imports torch."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import orjson
import psutil

_CGROUP = Path("/sys/fs/cgroup")
_QUERY_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory of one GPU, in bytes."""

    total: int
    free: int


def available_ram(cgroup: Path = _CGROUP) -> int:
    """Bytes of memory a new process can use: the machine's, or what its container still allows."""
    available = psutil.virtual_memory().available
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return available
    return min(available, max(0, limit - used))


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def shm_free(path: str = "/dev/shm") -> int | None:
    """Free bytes of shared memory; None where there is none."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def raise_open_file_limit(target: int) -> tuple[int, int]:
    """Raise this process's soft limit on open files towards ``target``, up to the hard limit.

    Child processes inherit it. SGLang tries the same, but gives up where the hard limit is below its target.

    Returns:
        (soft, hard) as they are afterwards.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < target:
        soft = target if hard == unlimited else min(target, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (target if soft == unlimited else soft), (target if hard == unlimited else hard)


def free_ports(count: int) -> int:
    """The first of that many ports in a row that were free a moment ago."""
    while True:
        first = free_port()
        if all(port_problem("127.0.0.1", port) is None for port in range(first, first + count)):
            return first


def port_problem(host: str, port: int) -> str | None:
    """Why a server could not listen on host:port, naming the process that does; None if it can."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        return f"host '{host}' cannot be resolved: {error}"
    family, kind, proto, _, address = infos[0]
    with socket.socket(family, kind, proto) as probe:
        # As the server does: a connection that lingers in TIME_WAIT does not occupy the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            owner = port_owner(port)
            return f"{host}:{port}: {error.strerror or error}" + (f" ({owner})" if owner else "")
    return None


def port_owner(port: int) -> str | None:
    """Name and pid of the process listening on a TCP port, where the system lets us see it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return None
    for connection in connections:
        if connection.status != psutil.CONN_LISTEN or not connection.laddr or connection.laddr.port != port:
            continue
        if connection.pid is not None:
            try:
                return f"held by {psutil.Process(connection.pid).name()}, pid {connection.pid}"
            except psutil.Error:
                return f"held by pid {connection.pid}"
    return None


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def nvidia_gpus(env: Mapping[str, str]) -> list[Gpu] | None:
    """The visible NVIDIA GPUs in order; None where ``nvidia-smi`` does not answer."""
    out = _query(["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"])
    return None if out is None else _visible(parse_nvidia_smi(out), env.get("CUDA_VISIBLE_DEVICES"))


def rocm_gpus(env: Mapping[str, str]) -> list[Gpu] | None:
    """The visible AMD GPUs in order; None where ``rocm-smi`` does not answer."""
    out = _query(["rocm-smi", "--showmeminfo", "vram", "--json"])
    visible = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    return None if out is None else _visible(parse_rocm_smi(out), visible)


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """One ``total, free`` line a GPU, in MiB; lines that are no numbers (a GPU that is lost) are left out."""
    gpus = []
    for line in text.splitlines():
        total, _, free = line.partition(",")
        if total.strip().isdigit() and free.strip().isdigit():
            gpus.append(Gpu(int(total) << 20, int(free) << 20))
    return gpus


def parse_rocm_smi(text: str) -> list[Gpu]:
    """``{"card0": {"VRAM Total Memory (B)": "...", "VRAM Total Used Memory (B)": "..."}, ...}``."""
    try:
        cards = orjson.loads(text)
        gpus = [
            Gpu(int(card["VRAM Total Memory (B)"]), _rocm_free(card))
            for name, card in cards.items()
            if name.startswith("card")
        ]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
        return []
    return gpus


def _rocm_free(card: Mapping[str, str]) -> int:
    return int(card["VRAM Total Memory (B)"]) - int(card["VRAM Total Used Memory (B)"])


def _visible(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    if visible is None:
        return gpus
    chosen = [part.strip() for part in visible.split(",") if part.strip()]
    if all(part.isdigit() for part in chosen):
        return [gpus[int(part)] for part in chosen if int(part) < len(gpus)]
    return gpus[: len(chosen)]  # UUIDs: which ones is not known here, how many is


def _query(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
