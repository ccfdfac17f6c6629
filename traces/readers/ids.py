"""Block ids of readers: checking that they are chained, chaining those that are not, and making new ones."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radix_cache.theory import ROOT, common_blocks
from traces.model import BlockIds

NO_IDS: BlockIds = np.empty(0, dtype=np.int64)

# No model has a longer context. Where a reader makes ids for a length, a wrong digit must not fill the memory.
MAX_PROMPT_TOKENS = 1 << 24


@dataclass(slots=True)
class ChainCheck:
    """Checks that every id always follows the same id: only then does an id stand for its whole prefix."""

    _parents: dict[int, int] = field(default_factory=dict)

    def fault(self, ids: BlockIds, checked: BlockIds) -> str | None:
        """What is wrong with a prompt's ids, or None. ``checked`` are ids of an earlier, correct prompt.

        Ids that a prompt has in common with ``checked`` need no second look, which makes the usual
        case (a turn that appends) cheap.
        """
        start = common_blocks(ids, checked)
        parent = int(ids[start - 1]) if start else ROOT
        for at, block in enumerate(ids[start:].tolist(), start):
            if block < 0:
                return f"block id {block} is negative"
            known = self._parents.setdefault(block, parent)
            if known != parent:
                return (
                    f"ids out of order: block {at} has id {block} after {_name(parent)}, which earlier came after "
                    f"{_name(known)}; ids must name their whole prefix (chained)"
                )
            parent = block
        return None


def _name(block: int) -> str:
    return "the start of the prompt" if block < 0 else f"id {block}"


@dataclass(slots=True)
class Chainer:
    """Gives ids of blocks that name contents alone (not what is before them) ids that name their whole prefix.

    Equal contents after equal prefixes get equal ids, counted from 0. Ids that are chained already are only renumbered.
    """

    _ids: dict[tuple[int, int], int] = field(default_factory=dict)

    def chained(self, contents: BlockIds, before: tuple[BlockIds, BlockIds] = (NO_IDS, NO_IDS)) -> BlockIds:
        """Ids of a prompt's blocks.

        Args:
            contents: what names each block, int64, shape (n,).
            before: contents and ids of another prompt; what this one has in common with it is not looked up again.
        """
        start = common_blocks(contents, before[0])
        parent = int(before[1][start - 1]) if start else ROOT
        out = array("q")
        for content in contents[start:].tolist():
            parent = self._ids.setdefault((parent, content), len(self._ids))
            out.append(parent)
        new = np.frombuffer(out, dtype=np.int64) if out else NO_IDS
        return np.concatenate([before[1][:start], new])


@dataclass(slots=True)
class TokenBlocks:
    """Block ids of prompts whose tokens are known: equal ids exactly where all tokens up to there are equal.

    One object a namespace (a session with its subagents). Ids count from 0.
    """

    block_size: int
    _ids: dict[tuple[int, bytes], int] = field(default_factory=dict)

    def ids(self, tokens: npt.NDArray[np.int64]) -> BlockIds:
        """Ids of the full blocks of a prompt: int64, shape ``(len(tokens) // block_size,)``."""
        size = self.block_size
        parent = ROOT
        out = array("q")
        for start in range(0, len(tokens) - size + 1, size):
            parent = self._ids.setdefault((parent, tokens[start : start + size].tobytes()), len(self._ids))
            out.append(parent)
        return np.frombuffer(out, dtype=np.int64) if out else NO_IDS


@dataclass(slots=True)
class FreshBlocks:
    """Block ids for prompts of which only lengths are known: so much of the previous prompt, then blocks never seen."""

    block_size: int
    _next: int = 0

    def ids(self, prompt_tokens: int, shared_tokens: int, before: BlockIds) -> BlockIds:
        """Ids of a prompt that repeats ``shared_tokens`` tokens of the prompt with ids ``before``.

        Only whole blocks can be shared: the rest of a block that is shared in part counts as new.
        """
        full = prompt_tokens // self.block_size
        kept = min(shared_tokens // self.block_size, len(before), full)
        new = np.arange(self._next, self._next + full - kept, dtype=np.int64)
        self._next += full - kept
        return np.concatenate([before[:kept], new])


def block_ids(raw: object) -> BlockIds | None:
    """A JSON list of integers as an int64 array; None if it is anything else."""
    if isinstance(raw, np.ndarray):
        return raw
    if not isinstance(raw, list):
        return None
    try:
        # array() is three times as fast as numpy on lists of ints, and takes nothing but integers.
        return np.frombuffer(array("q", raw), dtype=np.int64) if raw else NO_IDS
    except (TypeError, OverflowError):
        return None


def full_blocks(ids: BlockIds, prompt_tokens: int, block_size: int) -> tuple[BlockIds, bool] | None:
    """Ids of the full blocks, and whether an id of the partial last block was dropped; None if neither fits."""
    full = prompt_tokens // block_size
    if len(ids) == full:
        return ids, False
    if len(ids) == full + 1 and prompt_tokens % block_size:
        return ids[:full], True
    return None
