"""Shared memory of LMCache that dead processes left behind.

LMCache 0.5.6 names the segments of a CPU's KV cache ``/dev/shm/lmcache_kv_PID_N`` and removes them when the process
ends in order. After a SIGKILL they stay, each as large as a plane of the KV cache.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
_NAME = re.compile(r"lmcache_kv_(\d+)_\d+")


def stale_segments(folder: Path = SHM) -> list[Path]:
    """Segments whose process no longer runs. Those of other users' processes count as running."""
    found = []
    for path in sorted(folder.glob("lmcache_kv_*")):
        match = _NAME.fullmatch(path.name)
        if match is not None and not psutil.pid_exists(int(match[1])):
            found.append(path)
    return found


def clear_stale_segments(folder: Path = SHM) -> int:
    """Remove them; the bytes that this gives back."""
    freed = 0
    for path in stale_segments(folder):
        with suppress(OSError):  # another launcher was faster, or it is another user's
            size = path.stat().st_size
            path.unlink()
            freed += size
    return freed
