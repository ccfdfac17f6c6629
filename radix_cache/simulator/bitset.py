"""A set of small integers whose greatest is found in a few steps: words of 64 bits, and words over these words.

What is in the set is a set bit of the lowest level; a bit of a level above says that the word below is not 0. A million
integers take four levels.
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
    """(words, where each level begins, the lowest first) of an empty set of integers below ``size``."""
    begins, words = [0], max(1, -(-size // 64))
    while words > 1:
        begins.append(begins[-1] + words)
        words = -(-words // 64)
    return np.zeros(begins[-1] + 1, dtype=np.int64), np.array(begins, dtype=np.int64)


def _highest_bit(typing: Any, word: Any) -> Any:
    """Number of the highest set bit of an int64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = builder.ctlz(args[0], context.get_constant(types.boolean, True))
        return builder.sub(context.get_constant(types.int64, 63), zeros)

    return types.int64(types.int64), generate


highest_bit: Any = intrinsic(_highest_bit)


@inlined
def add(words: Any, begins: Any, number: int) -> None:
    for begin in begins:
        word = words[begin + (number >> 6)]
        words[begin + (number >> 6)] = word | (1 << (number & 63))
        if word != 0:
            return
        number >>= 6


@inlined
def remove(words: Any, begins: Any, number: int) -> None:
    """Take out a number that is in the set."""
    for begin in begins:
        word = words[begin + (number >> 6)] & ~(1 << (number & 63))
        words[begin + (number >> 6)] = word
        if word != 0:
            return
        number >>= 6


@inlined
def greatest(words: Any, begins: Any) -> int:
    """The greatest number, or NONE."""
    if words[begins[-1]] == 0:
        return NONE
    number: int = 0
    for level in range(len(begins) - 1, -1, -1):
        number = (number << 6) + highest_bit(words[begins[level] + number])
    return number
