"""What this process knows of single requests that SGLang does not tell: why the offload tier did not help, how long
admission held them. It travels to the client in the answer's ``meta_info`` under ``KEY``. Knows nothing of SGLang.

One book a process: only the scheduler writes and reads it, so there is no lock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, TypedDict

KEY = "agentserve"
_REMEMBERED = 4096  # requests; ranks that answer nobody never take theirs out


class Facts(TypedDict, total=False):
    """What is known of one request; what does not apply is absent.

    Attributes:
        lookup: what asking the offload tier came to: hit, miss, late (given up) or offline (not asked).
        found: tokens of the prompt, from its beginning, that the tier said it has.
        refused_from: tokens before the first page that is not asked for, since it was refused lately.
        load: what loading came to: restored, late (given up), refused (not what was stored) or failed.
        from_storage: tokens that were restored from behind the daemon's host memory, where it tells.
        held_s: seconds that admission held the request back.
    """

    lookup: Literal["hit", "miss", "late", "offline"]
    found: int
    refused_from: int
    load: Literal["restored", "late", "refused", "failed"]
    from_storage: int
    held_s: float


class FactBook:
    """Facts by request id; the oldest are forgotten beyond ``remembered`` requests."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self._facts: OrderedDict[str, Facts] = OrderedDict()
        self._held_since: OrderedDict[str, float] = OrderedDict()
        self._remembered = remembered

    def __len__(self) -> int:
        return len(self._facts)

    def of(self, request: str) -> Facts:
        """The facts of a request, to be changed in place."""
        facts = self._facts.setdefault(request, Facts())
        self._shorten(self._facts)
        return facts

    def admission(self, request: str, passed: bool, now: float) -> None:
        """Admission looked at a waiting request; ``now`` in seconds of any one clock."""
        if not passed:
            self._held_since.setdefault(request, now)
            self._shorten(self._held_since)
        elif request in self._held_since:
            self.of(request)["held_s"] = now - self._held_since.pop(request)

    def take(self, request: str) -> Facts | None:
        """The facts of a request that has ended; they are forgotten here."""
        self._held_since.pop(request, None)
        return self._facts.pop(request, None)

    def _shorten(self, book: OrderedDict[str, Facts] | OrderedDict[str, float]) -> None:
        while len(book) > self._remembered:
            book.popitem(last=False)


BOOK = FactBook()


def note_lookup(request: str, outcome: str, found: int = 0) -> None:
    """What asking the offload tier came to, as in ``Facts``; ``found`` in tokens from the prompt's beginning."""
    BOOK.of(request).update({"lookup": outcome, "found": found})  # type: ignore[typeddict-item]


def note_load(request: str, outcome: str) -> None:
    """What loading from the offload tier came to, as in ``Facts``; what goes wrong first counts."""
    BOOK.of(request).setdefault("load", outcome)  # type: ignore[typeddict-item]
