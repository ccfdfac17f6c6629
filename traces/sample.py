"""Choosing sessions of a trace by chance, the same ones for the same seed. Pure."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable


def sampled(ids: Iterable[str], count: int, seed: int) -> set[str]:
    """``count`` of the session ids, or all if there are fewer; memory holds no more.

    Which ones depends on the ids and the seed alone, not on their order: the same sessions are chosen from a trace that
    was sorted or converted, and a larger sample with the same seed holds the smaller one.

    Raises:
        ValueError: ``count`` below 1.
    """
    if count < 1:
        raise ValueError(f"a sample has at least one session, not {count}")

    def rank(name: str) -> bytes:
        return hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=16).digest()

    return {name for _, name in heapq.nsmallest(count, ((rank(name), name) for name in ids))}
