"""Seals: a checksum of everything that a page holds, stored and restored together with the page.

A restored prefix that lacks a plane, holds another prefix's data or was cut short gives other text and no error.
Each page therefore carries 16 bytes: a checksum of its bytes in every plane, and a digest of the tokens from the
start of the prompt to its end. They are a plane of their own, so that they travel with K and V through every tier.

The checksum is a sum of 64-bit words times position-dependent odd weights, modulo 2**64. It finds missing, moved and
damaged bytes, not forgery. All arithmetic is the device's own; nothing is copied to the host but the verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

SEAL_WORDS = 2  # int64 words of a page's seal: checksum of the data, digest of the tokens
_WORD = 8
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: consecutive multiples are spread evenly
_BATCH_PAGES = 256  # bounds the temporary copy of the words


class Sealer:
    """Computes, writes and checks the seals of pages.

    Args:
        planes: tensors of shape (slots, ...), contiguous, one a layer and plane, in a fixed order; all of what a
            page consists of, whether it is offloaded or not.
        seals: int64, shape (pages, 2): where the seals of the pages live.
        page_size: slots per page.
        namespace: goes into every token digest: two namespaces never accept each other's pages.

    Raises:
        ValueError: a plane does not divide into pages of whole 64-bit words, or the pages do not match.
    """

    def __init__(self, planes: Sequence[torch.Tensor], seals: torch.Tensor, page_size: int, namespace: str) -> None:
        self._seals = seals
        self._page_size = page_size
        self._namespace = namespace
        self._words: list[torch.Tensor] = []
        for plane in planes:
            row = plane[0].numel() * plane.element_size()
            pages = plane.shape[0] // page_size
            if plane.shape[0] % page_size or (row * page_size) % _WORD or pages != seals.shape[0]:
                raise ValueError(
                    f"a plane of shape {tuple(plane.shape)} ({plane.dtype}) is not {seals.shape[0]} pages of "
                    f"{page_size} slots in 64-bit words"
                )
            self._words.append(plane.view(pages, -1).view(torch.int64))
        longest = max(words.shape[1] for words in self._words)
        self._weights = _weights(longest).to(seals.device)

    def write(self, pages: torch.Tensor, digests: torch.Tensor) -> None:
        """Seal pages as they are now. ``pages``: int64 page numbers; ``digests``: int64, one a page."""
        self._seals[pages] = torch.stack([self.checksums(pages), digests.to(self._seals.device)], dim=1)

    def wrong(self, pages: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
        """Which of the pages do not hold what their seal and the tokens say: bool, on the host."""
        found = self._seals[pages]
        wrong = (found[:, 0] != self.checksums(pages)) | (found[:, 1] != digests.to(self._seals.device))
        return wrong.cpu()

    def failures(self, pages: torch.Tensor, digests: torch.Tensor) -> int:
        """How many of the pages are ``wrong``."""
        return int(self.wrong(pages, digests).sum())

    def checksums(self, pages: torch.Tensor) -> torch.Tensor:
        """Checksum of each page over all planes, int64."""
        parts = [self._batch(pages[i : i + _BATCH_PAGES]) for i in range(0, len(pages), _BATCH_PAGES)]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=self._seals.device)

    def _batch(self, pages: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(pages), dtype=torch.int64, device=self._seals.device)
        for number, words in enumerate(self._words):
            part = (words[pages] * self._weights[: words.shape[1]]).sum(dim=1)
            # An odd factor a plane, so that planes of equal size cannot change places.
            total += part * _signed((2 * number + 1) * _GOLDEN | 1)
        return total

    def digests(self, tokens: Sequence[int], salt: str, first_page: int) -> torch.Tensor:
        """Digest at the end of each whole page of ``tokens`` from ``first_page`` on: int64, on the host.

        Each covers all tokens from the start of the prompt, since K and V depend on all of them.
        """
        data = np.asarray(tokens, dtype=np.int64).tobytes()
        step = self._page_size * _WORD
        running = hashlib.blake2b(f"{self._namespace}\0{salt}".encode(), digest_size=_WORD)
        made = []
        for page in range(len(tokens) // self._page_size):
            running.update(data[page * step : (page + 1) * step])
            if page >= first_page:
                made.append(int.from_bytes(running.copy().digest(), "little", signed=True))
        return torch.tensor(made, dtype=torch.int64)


def new_seals(pages: int, device: torch.device | str) -> torch.Tensor:
    """Room for the seals of ``pages`` pages. Zero seals nothing: no digest of tokens is zero in practice."""
    return torch.zeros(pages, SEAL_WORDS, dtype=torch.int64, device=device)


def _weights(count: int) -> torch.Tensor:
    """Odd 64-bit weights by position (splitmix64's output function), the same on every machine."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(x.view(np.int64))


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that torch's int64 takes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def pages_of(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Page numbers of whole pages of slots, in order."""
    return slots[::page_size] // page_size
