"""The rules by which nothing waits for a daemon for ever, and nobody gets memory that a daemon may still write.

Pure: clocks and operations come from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Clock = Callable[[], float]


class Pending(Protocol):
    """An answer that may never come."""

    def query(self) -> bool:
        """Whether it is there; raises when the request failed, which is also an end."""
        ...


def settled(pending: Pending) -> bool:
    """Whether the other side is done with the request, in success or in failure."""
    try:
        return bool(pending.query())
    except Exception:  # a failed request is one that no longer touches memory
        return True


class Looks:
    """The scheduler's looks for one answer, and how long the request was held for want of it.

    The scheduler looks between its steps, and only while it could let the request run: what counts is the time from a
    look that finds no answer to the step after it. Times are seconds on one clock.

    Args:
        now: of the first look.
    """

    def __init__(self, now: float) -> None:
        self._first = now
        self._missed_at: float | None = None
        self._step_s = 0.0  # from the latest look to the step after it
        self.held_s = 0.0

    def missed(self, now: float) -> None:
        """A look found no answer."""
        self._missed_at = now

    def step(self, now: float) -> None:
        """A step of the scheduler begins, in which it may look again."""
        if self._missed_at is not None:
            self._step_s = now - self._missed_at
            self.held_s += self._step_s
            self._missed_at = None

    def overdue(self, now: float, deadline_s: float) -> bool:
        """Whether nobody waits for the answer any more: the deadline, counted from the first look, is over."""
        return now >= self._first + deadline_s

    def last_chance(self, now: float, deadline_s: float, slack_s: float = 1.0) -> bool:
        """Whether the next look would be overdue by more than ``slack_s``, if this step takes as long as the last."""
        return now + self._step_s > self._first + deadline_s + slack_s


class DeadlineFuture:
    """A store's answer that also counts as there, as a failure, once waiting longer is pointless.

    Args:
        inner: the answer.
        deadline: time on ``clock`` at which to give up.
        may_give_up: asked after the deadline; where it says no, the answer stays outstanding.
        gone: whether the other side is known to be dead; then there is no waiting at all.
    """

    def __init__(
        self,
        inner: Any,
        deadline: float,
        *,
        may_give_up: Callable[[], bool] = lambda: True,
        gone: Callable[[], bool] = lambda: False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._inner = inner
        self._deadline = deadline
        self._may_give_up = may_give_up
        self._gone = gone
        self._clock = clock
        self._since = clock()

    @property
    def waited_s(self) -> float:
        """Seconds since it was asked for."""
        return self._clock() - self._since

    @property
    def given_up(self) -> bool:
        return not settled(self._inner) and (self._gone() or (self._clock() >= self._deadline and self._may_give_up()))

    def query(self) -> bool:
        return self.given_up or bool(self._inner.query())

    def result(self, timeout: float | None = None) -> Any:
        """The answer. Raises TimeoutError where it was given up or does not come within ``timeout`` seconds."""
        if self.given_up:
            raise TimeoutError("the daemon did not answer in time")
        return self._inner.result(timeout=timeout)


@dataclass
class Held:
    """Memory that a load given up may still write to, on this rank or another. ``Pending``: until it was released.

    Attributes:
        pending: this rank's load.
        gone: whether the daemon that got it is known to be dead.
        slots: on this rank.
        released: whether all ranks' loads are over.
    """

    pending: Pending
    gone: Callable[[], bool]
    slots: Any
    released: bool = False

    def query(self) -> bool:
        return self.released


class Quarantine:
    """Slots in the order they were given up; they leave in that order, so that all ranks can agree on a count."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def __len__(self) -> int:
        return len(self._held)

    def add(self, held: Held) -> None:
        self._held.append(held)

    def ready(self) -> int:
        """How many from the front nobody can write to any more."""
        for number, held in enumerate(self._held):
            if not (settled(held.pending) or held.gone()):
                return number
        return len(self._held)

    def release(self, count: int) -> list[Any]:
        """Take out the first ``count``, as all ranks do; their slots."""
        freed, self._held = self._held[:count], self._held[count:]
        for held in freed:
            held.released = True
        return [held.slots for held in freed]


class Refused:
    """Pages that were restored wrong lately, by digest: asking for them again would cost a load each time.

    The daemon keeps what it holds under a key, so storing the page anew does not mend it; that it has evicted it by
    now cannot be seen. Hence a page is tried again after ``keep_s`` seconds.
    """

    def __init__(self, keep_s: float = 300.0, *, clock: Clock = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._until: dict[int, float] = {}

    def add(self, digests: Iterable[int]) -> None:
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        self._until.update(dict.fromkeys(digests, now + self._keep_s))

    def __len__(self) -> int:
        return len(self._until)

    def first(self, digests: Sequence[int]) -> int:
        """Position of the first page among ``digests`` that was refused; their number where none was."""
        now = self._clock()
        return next((i for i, digest in enumerate(digests) if self._until.get(digest, now) > now), len(digests))
