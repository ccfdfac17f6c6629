"""Which process a daemon is, and whether it is dead: only then can it no longer write."""

from __future__ import annotations

import psutil


def listener(port: int) -> psutil.Process | None:
    """The process that listens on a local TCP port, where the system lets us see it."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                return psutil.Process(connection.pid) if connection.pid else None
    except (psutil.Error, OSError):
        pass
    return None


def dead(process: psutil.Process) -> bool:
    """Whether it has ended; its number may belong to another process by now. In doubt it has not."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
