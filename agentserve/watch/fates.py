"""What became of each token of a prompt, decided when its prefill begins: hit, new, still being computed, or lost.

A page counts as known once a request with it began; so *lost* is what an unlimited cache would have had and this one
had not: evicted, cleared, or never admitted. No SGLang here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

PAGES_KEPT = 1 << 18  # known pages; about 133 bytes each: 35 MB
_DIGEST_BYTES = 12


class Fates(NamedTuple):
    """Tokens of one prompt; they sum to its length."""

    hit: int  # in the cache, on the device or restored
    in_flight: int  # an earlier request was still computing them
    lost: int  # computed before, and not in the cache
    new: int  # never seen, the last token, and what is left of a page


class SeenPages:
    """Pages of all prompts and answers so far, by a digest of all tokens up to their end.

    Args:
        page_size: tokens per page.
        limit: pages remembered; those unseen for longest are forgotten, and then count as new.
    """

    def __init__(self, page_size: int, limit: int = PAGES_KEPT) -> None:
        self._page = page_size
        self._limit = limit
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # digest -> computed; False: its request still runs

    def __len__(self) -> int:
        return len(self._seen)

    def begin(self, tokens: Sequence[int], cached: int, salt: str = "") -> Fates:
        """A request's prefill begins; its pages are known from now on, and computed from ``computed`` on.

        Args:
            tokens: the prompt.
            cached: tokens of it that the cache had.
            salt: requests with different salts share nothing.
        """
        length = len(tokens)
        cached = min(cached, length)
        reach = (length - 1) // self._page if length else 0  # the last token is always computed
        known = ready = 0
        unbroken = True
        for number, digest in enumerate(self._digests(tokens, salt)):
            state = self._seen.get(digest)
            unbroken = unbroken and state is not None
            if unbroken and number < reach:
                known = number + 1
                if state and ready == number:
                    ready = known
            if state is None:
                self._seen[digest] = False
            self._seen.move_to_end(digest)
        self._forget()
        known_tokens, ready_tokens = known * self._page, ready * self._page
        lost = max(0, ready_tokens - cached)
        in_flight = max(0, known_tokens - max(ready_tokens, cached))
        return Fates(cached, in_flight, lost, length - cached - in_flight - lost)

    def computed(self, tokens: Sequence[int], salt: str = "") -> None:
        """These tokens have been computed: a prompt at its first token, a prompt with its answer at the end."""
        for digest in self._digests(tokens, salt):
            self._seen[digest] = True
            self._seen.move_to_end(digest)
        self._forget()

    def abandoned(self, tokens: Sequence[int], salt: str = "") -> None:
        """A request ended before its prompt was computed: what only it was computing is not known any more."""
        for digest in self._digests(tokens, salt):
            if self._seen.get(digest) is False:
                del self._seen[digest]

    def _digests(self, tokens: Sequence[int], salt: str) -> Iterator[bytes]:
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
        data = memoryview(ids).cast("B")
        running = hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES)
        size = self._page * ids.itemsize
        for start in range(0, len(data) // size * size, size):
            running.update(data[start : start + size])
            yield running.digest()

    def _forget(self) -> None:
        while len(self._seen) > self._limit:
            self._seen.popitem(last=False)
