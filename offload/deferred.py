"""Stores that wait until it is known what becomes of a conversation. Pure; times are seconds.

Whether a prefix comes back is known better a moment after the answer than with it: the client may end the conversation,
or go on with it, and then a longer prefix is stored. Until then the prefix is the newest thing in the device's cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Deferred:
    """One prefix that may be stored.

    Attributes:
        request: id of the request that computed it.
        flow: conversation; a longer prefix of it takes this one's place.
        tokens: token ids of the prefix.
        start: tokens of it that the tier is known to have.
        node: where it ends in the device's cache.
        extra: what else its key needs.
        due: when to decide; None while the request still runs, which keeps the prefix on the device.
    """

    request: str
    flow: Hashable
    tokens: Sequence[int]
    start: int
    node: Any
    extra: tuple[str | None, str | None]
    due: float | None = None


class DeferredStores:
    """What waits, in the order it came.

    Where memory is short, a prefix may be evicted before anybody has decided: then nothing waits for ``hurry_s``.

    Args:
        delay_s: between the end of a request and the decision.
        hurry_s: how long after such a loss all is decided at once.
    """

    def __init__(self, delay_s: float, *, hurry_s: float = 60.0) -> None:
        self._delay_s = delay_s
        self._hurry_s = hurry_s
        self._hurry_until = float("-inf")
        self._waiting: dict[str, Deferred] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Deferred) -> None:
        """A request has computed this much. Shorter prefixes of the same flow that it begins with need no store."""
        replaced = [
            other.request
            for other in self._waiting.values()
            if other.request == item.request
            or (other.flow == item.flow and item.tokens[: len(other.tokens)] == other.tokens)
        ]
        for request in replaced:
            del self._waiting[request]
        self._waiting[item.request] = item

    def released(self, request: str, now: float) -> None:
        """A request holds its prefix no longer; the clock starts."""
        item = self._waiting.get(request)
        if item is not None:
            item.due = now if now < self._hurry_until else now + self._delay_s

    def lost(self, now: float) -> None:
        """Something was evicted before its decision: decide at once for a while, what waits already, too."""
        self._hurry_until = now + self._hurry_s
        for item in self._waiting.values():
            if item.due is not None:
                item.due = min(item.due, now)

    def due(self, now: float) -> list[Deferred]:
        """Take out what is to be decided now."""
        ready = [item for item in self._waiting.values() if item.due is not None and item.due <= now]
        for item in ready:
            del self._waiting[item.request]
        return ready

    def clear(self) -> None:
        """Forget all: the device's cache is empty."""
        self._waiting.clear()
