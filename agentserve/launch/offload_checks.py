"""What can be known to go wrong with offload before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from agentserve.launch import host
from agentserve.launch.facts import CheckpointFacts
from agentserve.launch.finding import Finding
from agentserve.launch.recipe import Recipe
from offload.daemon import DaemonSpec
from offload.lmcache_copies import BUILD_COMMAND, LMCACHE_VERSION, cuda_copies_problem
from offload.settings import OffloadError


def check_offload(recipe: Recipe, facts: CheckpointFacts | None, available: int) -> Iterator[Finding]:
    """LMCache itself, the size of its objects, and its daemon's ports and memory (bytes available)."""
    offload = recipe.offload
    try:
        found = version("lmcache")
    except PackageNotFoundError:
        yield Finding("error", "lmcache is not installed", "install the extra: pip install 'agentserve[lmcache]'")
        return
    if found != LMCACHE_VERSION:
        yield Finding(
            "warning",
            f"lmcache {found} is installed, offload is written for {LMCACHE_VERSION}",
            f"install lmcache=={LMCACHE_VERSION}",
        )
    page = recipe.page_size or (facts.block_size if facts else None)
    if page is not None and offload.chunk_tokens % page:
        yield Finding(
            "error",
            f"offload.chunk_tokens {offload.chunk_tokens} is not a multiple of the page size {page}",
            f"set it to {max(1, offload.chunk_tokens // page) * page}",
        )
    try:
        offload.settings(recipe.tp).address(0, recipe.tp)
    except OffloadError as error:
        yield Finding("error", f"offload.address: {error}", f"name one daemon, or {recipe.tp} with commas between")
    if not offload.starts_daemon:
        return
    if recipe.device == "cuda":
        yield from _cuda_copies()
    yield from _ports(offload.specs(recipe.tp))
    if offload.l2 is not None and offload.redis_client == "valkey" and find_spec("glide_sync") is None:
        yield Finding(
            "error",
            "offload.redis_client valkey needs the package valkey-glide-sync, which is not installed",
            "pip install valkey-glide-sync, or set offload.redis_client to resp, which does not reconnect",
        )
    if offload.memory_gb * 1e9 > available:
        yield Finding(
            "error",
            f"offload.memory_gb {offload.memory_gb:g} is more than the {available / 1e9:.1f} GB available",
            "lower offload.memory_gb",
        )


def _cuda_copies() -> Iterator[Finding]:
    problem = cuda_copies_problem()
    if problem is not None:
        yield Finding(
            "error",
            f"LMCache's compiled CUDA copies do not load {problem}; what it copies without them is wrong, and each "
            "restore would be refused",
            f"build LMCache for the torch that is installed: {BUILD_COMMAND}",
        )


def _ports(daemons: list[DaemonSpec]) -> Iterator[Finding]:
    taken: dict[int, str] = {}
    for rank, daemon in enumerate(daemons):
        for field, port in (("port", daemon.port), ("http_port", daemon.http_port)):
            whose = f"offload.{field}" + (f" of rank {rank}" if len(daemons) > 1 else "")
            if port > 65535:
                problem: str | None = f"{port} is no port"
            elif port in taken:
                problem = f"{port} is {taken[port]} too"
            else:
                problem = host.port_problem("127.0.0.1", port)
            taken.setdefault(port, whose)
            if problem is not None:
                yield Finding("error", f"{whose}: {problem}", f"set offload.{field}: rank r takes it plus 2 r")
