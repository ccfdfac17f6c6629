"""Why a server that died early died, guessed from its log: common causes and what to do about each."""

from __future__ import annotations

import re
import signal

# First match wins, so the specific ones stand first. Patterns are searched in the last lines of the log.
_CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"address already in use|Port is already in use|\[Errno 98\]",
        "the port is taken: stop the other process or pass --port",
    ),
    (
        r"SGLANG_PLATFORM=\S+ not found in discovered platform plugins",
        "the CPU platform plugin is not registered: install agentserve with `pip install -e .`",
    ),
    (
        r"No module named '(?P<what>[^']+)'",
        "the Python package '{what}' is missing: install the requirements of the README again",
    ),
    (
        r"CUDA out of memory|HIP out of memory|OutOfMemoryError|Not enough memory|mem-fraction-static",
        "out of GPU memory: lower kv.memory_fraction or kv.capacity_tokens, or raise tp",
    ),
    (
        r"MemoryError|Cannot allocate memory|can't allocate memory|DefaultCPUAllocator",
        "out of memory: lower kv.capacity_tokens (--kv-tokens)",
    ),
    (r"Too many open files", "the open-file limit was reached: raise it with `ulimit -n`"),
    (r"No space left on device", "a disk or /dev/shm is full"),
    (
        r"error: (?P<what>unrecognized arguments: .*|argument .*)",
        "SGLang refused an argument ({what}): correct extra_args in the recipe",
    ),
)


def diagnose(log: str, exit_code: int) -> str | None:
    """A likely cause with its remedy, or None.

    Args:
        log: the end of the server's log.
        exit_code: as ``subprocess`` reports it: negative for a signal.
    """
    for pattern, advice in _CAUSES:
        match = re.search(pattern, log, re.IGNORECASE)
        if match:
            return advice.format(**match.groupdict())
    if exit_code == -signal.SIGKILL:
        return "killed by SIGKILL, most often by the kernel for lack of memory: lower kv.capacity_tokens"
    return None
