"""Stopping a replay by signal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress


class Signals:
    """First SIGINT or SIGTERM: ``on_first``. Second: leave at once (records are flushed as they are written)."""

    def __init__(self, on_first: Callable[[], None], *, enabled: bool) -> None:
        self._on_first = on_first
        self._enabled = enabled
        self._count = 0

    def __enter__(self) -> None:
        if self._enabled:
            # Outside the main thread no handler can be set; the caller's own then stays in force.
            with suppress(ValueError, RuntimeError, NotImplementedError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def __exit__(self, *exc: object) -> None:
        if self._enabled:
            with suppress(ValueError, RuntimeError, NotImplementedError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    asyncio.get_running_loop().remove_signal_handler(number)

    def _signalled(self) -> None:
        self._count += 1
        if self._count > 1:
            os._exit(130)
        self._on_first()
