"""Requests that are over while the daemon may still hold read locks for them, and when which of them can be given back.

LMCache locks what a lookup found until it is loaded or unlocked; ending the request's session frees nothing, and its
four workers do not keep the order in which they were asked. So an unlock, and an end, come after the answers that they
build on. Pure: clocks and answers come from outside; two threads may use one ``OwedLocks``.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offload.guard import Clock, Pending, settled

# Locks are counts without names that end 300 s after the last one was taken: to take one off later could free another
# request's. Half a minute is kept for clocks and for the answer.
FREE_WITHIN_S = 270.0


@dataclass
class Asked:
    """What the daemon was asked for one request.

    Attributes:
        since: when it was asked first.
        gone: whether the daemon that was asked is known to be dead. What it had not read reaches its successor.
        key: what is to be unlocked once ``after`` are in; None where everything is loaded or unlocked already.
        after: answers outstanding.
    """

    since: float
    gone: Callable[[], bool]
    key: Any = None
    after: list[Pending] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether all answers are in."""
        return all(settled(pending) for pending in self.after)

    @property
    def clear(self) -> bool:
        """Whether the request's session can be ended at once."""
        return self.key is None and self.answered


class Due(NamedTuple):
    """A request that nothing is waited for any more."""

    request: str
    key: Any  # of a lookup to be read and unlocked before its session is ended; None: there is none
    in_time: bool = True  # whether its locks may be taken off; else they have ended by themselves


class OwedLocks:
    """Requests to unlock and to end, the oldest first; beyond ``remembered`` the oldest are left to expire."""

    def __init__(self, *, free_within_s: float = FREE_WITHIN_S, remembered: int = 4096, clock: Clock = time.monotonic):
        self._free_within_s = free_within_s
        self._remembered = remembered
        self._clock = clock
        self._owed: OrderedDict[str, Asked] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._owed)

    def __contains__(self, request: str) -> bool:
        return request in self._owed

    def add(self, request: str, asked: Asked) -> None:
        with self._lock:
            self._owed[request] = asked
            while len(self._owed) > self._remembered:
                self._owed.popitem(last=False)

    def due(self) -> list[Due]:
        """What can be settled now. They stay until ``done``."""
        found = []
        with self._lock:
            for request, asked in self._owed.items():
                in_time = self._clock() - asked.since <= self._free_within_s
                if asked.answered or asked.gone() or not in_time:
                    found.append(Due(request, asked.key, in_time))
        return found

    def unlocking(self, request: str, answer: Pending) -> None:
        """Its unlock was sent: never again, and its end is due when that is answered."""
        with self._lock:
            asked = self._owed.get(request)
            if asked is not None:
                asked.key, asked.after = None, [answer]

    def done(self, request: str) -> None:
        with self._lock:
            self._owed.pop(request, None)
