"""A set of small integers whose greatest is found in a few steps: words of 64 bits, and marks over these words.

What is in the set is a set bit of ``words``. Bit ``w`` of the marks that follow ``marks[0]`` says that word ``w`` is
not 0. No mark is set after the word of marks that ``marks[0]`` names: the search goes down from there. Adding and
removing ask nothing of what else is in the set: branches that are guessed wrong cost more than the writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import intrinsic

from radix_cache.simulator.jit import inlined
from radix_cache.simulator.layout import NONE


def new_bitset(size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(words, marks) of an empty set of integers below ``size``."""
    words = max(1, -(-size // 64))
    return np.zeros(words, dtype=np.int64), np.zeros(1 - (-words // 64), dtype=np.int64)


def _highest_bit(typing: Any, word: Any) -> Any:
    """Number of the highest set bit of an int64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], context.get_constant(types.boolean, True))
        return builder.sub(context.get_constant(types.int64, 63), zeros)

    return types.int64(types.int64), generate


highest_bit: Any = intrinsic(_highest_bit)


@inlined
def add(words: Any, marks: Any, number: int) -> None:
    word = number >> 6
    words[word] |= 1 << (number & 63)
    marks[1 + (word >> 6)] |= 1 << (word & 63)
    marks[0] = max(marks[0], word >> 6)


@inlined
def remove(words: Any, marks: Any, number: int) -> None:
    """Take out a number that is in the set."""
    word = number >> 6
    words[word] &= ~(1 << (number & 63))
    if words[word] == 0:
        marks[1 + (word >> 6)] &= ~(1 << (word & 63))


@inlined
def greatest(words: Any, marks: Any) -> int:
    """The greatest number, or NONE."""
    top = marks[0]
    while marks[1 + top] == 0:
        if top == 0:
            return NONE
        top -= 1
    marks[0] = top
    word = (top << 6) + highest_bit(marks[1 + top])
    return int((word << 6) + highest_bit(words[word]))
