"""Which earlier call a call continues. Pure, bounded.

A log with names of conversations is followed by them; else, and within a name, a call continues the one with which it
shares most user messages and tool results: these are what clients change least.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass, replace

from eval.diagnose.chat import Call

KEPT = 512  # calls that may still be continued
_LOOKED_AT = 16  # newest candidates that are compared: all turns of a long conversation are some
_TAIL = 4  # newest digests of a call by which it is found again


def _sharing(call: Call, earlier: Call) -> Call:
    """The call with its predecessor's messages where they are equal: a log repeats the history in each line."""
    known = (*earlier.request.messages, *earlier.answer)
    messages = call.request.messages
    shared = tuple(old if old == new else new for old, new in zip(known, messages, strict=False))
    return replace(call, request=replace(call.request, messages=(*shared, *messages[len(shared) :])))


@dataclass(frozen=True, eq=False)
class _Known:
    call: Call
    digests: tuple[bytes, ...]


class Conversations:
    """The calls that a next one may continue; the one unseen for longest is forgotten.

    Args:
        limit: calls kept.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self._limit = limit
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._by_digest: dict[bytes, dict[int, None]] = {}
        self._numbered = 0
        self.count = 0  # conversations seen: calls without predecessor

    def predecessor(self, call: Call) -> Call | None:
        """The call that this one continues, None for a first one; and remember this one."""
        digests = tuple(call.digests())
        found = self._best(call, digests)
        self._remember(_Known(call if found is None else _sharing(call, found.call), digests))
        if found is None:
            self.count += 1
        return None if found is None else found.call

    def _best(self, call: Call, digests: tuple[bytes, ...]) -> _Known | None:
        mine = set(digests)
        numbers = {n for digest in mine for n in self._by_digest.get(digest, ())}
        best: tuple[int, int] | None = None
        for number in heapq.nlargest(_LOOKED_AT, numbers):
            known = self._known[number]
            if (known.call.session or "") != (call.session or ""):
                continue
            shared = len(mine.intersection(known.digests))
            if call.session is None:
                # Nothing of its own: a new conversation that begins alike, or the same request once more.
                begins_alike = mine.issubset(known.digests) and len(mine) < len(known.digests)
                # Little in common: two conversations whose first lines are the same for all.
                little = known.digests[-1] not in mine and 2 * shared < len(known.digests)
                if begins_alike or little:
                    continue
            if best is None or (shared, number) > best:
                best = (shared, number)
        if best is not None:
            return self._known[best[1]]
        return self._same_session(call)

    def _same_session(self, call: Call) -> _Known | None:
        """The newest call of the same name: a compaction leaves no message to recognize."""
        if not call.session or not call.request.compacted:
            return None
        return next((k for k in reversed(self._known.values()) if k.call.session == call.session), None)

    def _remember(self, known: _Known) -> None:
        number = self._numbered
        self._numbered += 1
        self._known[number] = known
        for digest in self._found_by(known):
            self._by_digest.setdefault(digest, {})[number] = None
        while len(self._known) > self._limit:
            old, gone = self._known.popitem(last=False)
            for digest in self._found_by(gone):
                calls = self._by_digest[digest]
                calls.pop(old, None)
                if not calls:
                    del self._by_digest[digest]

    @staticmethod
    def _found_by(known: _Known) -> set[bytes]:
        """Its beginning, by which it is found after it was rolled back, and its end, by which it is continued."""
        return {*known.digests[:1], *known.digests[-_TAIL:]}
