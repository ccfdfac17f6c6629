"""One engine's memory with prompts that a daemon holds, and what a failure did to one of its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from agentserve.launch.daemon import Daemon
from eval.bench.offload_rig import locks, wait_until
from offload.settings import OffloadSettings
from tests.offload_lab import Lab, fill, rows, same, tokens_of

TIMES = OffloadSettings(
    lookup_deadline=2.0, load_deadline=2.0, store_deadline=2.0, ping_interval=0.5, ping_deadline=2.0
)
LENGTH = 1024
RESUME_S = 240.0


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: what failed.
        now: what happened, in words that the checks of this row bear out.
        waited_s: seconds that the request waited for offload; None where no request is concerned.
        limit_s: its deadline plus 1 s.
        checks: what had to be so, and was or was not: nothing wrong was returned, slots and locks came back.
        resumed_s: seconds from the end of the fault until the tier gave a hit again; None where it never stopped.
        stores_failed: stores that the daemon, back again, did not take within their deadline until then.
    """

    case: str
    now: str
    waited_s: float | None
    limit_s: float | None
    checks: dict[str, bool]
    resumed_s: float | None = None
    stores_failed: int = 0

    @property
    def good(self) -> bool:
        return all(self.checks.values()) and (
            self.waited_s is None or self.limit_s is None or self.waited_s <= self.limit_s
        )


class NotStoredError(RuntimeError):
    """The daemon did not take a store within its deadline."""


class Bed:
    """A lab with prompts that are stored, and the clock of one request."""

    def __init__(self, bench: Lab, running: Daemon) -> None:
        self.lab, self.daemon = bench, running
        self._seed = time.monotonic_ns()
        self.stores_failed = 0  # while it waited for hits again

    def prompt(self, length: int = LENGTH) -> list[int]:
        self._seed += 1
        return tokens_of(self._seed, length)

    def stored(self) -> tuple[list[int], list[torch.Tensor]]:
        """A new prompt whose state the daemon has, and what its slots held. Raises NotStoredError."""
        wait_until(lambda: bool(self.lab.connector.online), RESUME_S, "the daemon is used")
        ids = self.prompt()
        slots = self.lab.take(LENGTH)
        held = rows(self.lab.pool, slots)
        done = self.lab.store(f"store-{self._seed}", ids, slots, wait_s=60)
        self.lab.allocator.free(slots)
        if not done:
            raise NotStoredError("the daemon did not store a prompt")
        fill(self.lab.pool, self._seed % 1000)
        return ids, held

    def free(self) -> int:
        self.lab.cache.check_hicache_events()
        return int(self.lab.allocator.available_size())

    def hit(self, ids: list[int], held: list[torch.Tensor]) -> bool:
        """Whether a new request gets exactly what was stored. Its slots are free again."""
        self._seed += 1
        request = self.lab.request(f"hit-{self._seed}", ids)
        if self.lab.found(request) != LENGTH:
            self.lab.connector.finish_request(request.rid)
            return False
        slots = self.lab.load(request)
        good = slots is not None and same(rows(self.lab.pool, slots), held)
        if slots is not None:
            self.lab.allocator.free(slots)
        return good

    def resumed(self) -> float:
        """Seconds until a newly stored prompt is hit again."""
        started = time.monotonic()
        self.stores_failed = 0
        while True:
            try:
                if self.hit(*self.stored()):
                    return time.monotonic() - started
            except NotStoredError:
                self.stores_failed += 1
            if time.monotonic() - started > RESUME_S:
                raise RuntimeError("no hits again")
            time.sleep(0.5)

    def nothing_locked(self) -> bool:
        """Whether the daemon has no lock, session or lookup left a little after all requests have ended."""
        for name in [*self.lab.cache._external_flows, *self.lab.connector._active_sessions]:
            self.lab.cache._external_flows.pop(name, None)
            self.lab.connector.finish_request(name)
        try:
            wait_until(lambda: not any(locks(self.daemon).values()), 30, "no locks")
        except RuntimeError:
            return False
        return True

    def all_free(self, total: int) -> bool:
        """Whether all slots come back, once nobody can write to them any more."""
        wait_until(lambda: self.free() == total, 120, "all slots are free")
        return True


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that it took, and what it returned."""
    started = time.monotonic()
    value = work()
    return time.monotonic() - started, value


@contextmanager
def later(seconds: float, work: Callable[[], Any]) -> Iterator[None]:
    """Do it in ``seconds``, beside what runs in the block."""
    timer = threading.Timer(seconds, work)
    timer.start()
    try:
        yield
    finally:
        timer.join()
