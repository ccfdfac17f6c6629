"""A session in blocks of another size, and in a namespace that several sessions share. Pure.

Chained ids make both exact where the new blocks are smaller: a block of 64 tokens is four of 16, and what a
prompt's tail shares is known by the rule of ``traces.tokens`` (the tail is the beginning of the first child).
Larger blocks are named by the last of the blocks they consist of; what prompts share below a larger block is lost,
which ``coarser_loss`` counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np

from radix_cache.theory import ROOT, common_blocks, known_prefix
from traces.model import BlockIds, BlockScope, Flow, Session, Turn
from traces.tree import SessionTree

NO_IDS: BlockIds = np.empty(0, dtype=np.int64)


class BlockSizeError(ValueError):
    """Blocks that can neither be split into the wanted ones nor joined to them."""


@dataclass(slots=True)
class Reblocker:
    """Rewrites block ids, session by session.

    Args:
        block_size: tokens per block of the result; None keeps each session's.
        shared: ids of all sessions in one namespace, so that ``BlockScope.SESSION`` becomes ``GLOBAL`` without making
            sessions share anything; memory then grows with the distinct blocks of the trace.
    """

    block_size: int | None = None
    shared: bool = False
    _names: dict[Hashable, int] = field(default_factory=dict)

    def session(self, session: Session) -> Session:
        """The session with other ids; the same prompts share the same prefixes.

        Raises:
            BlockSizeError: neither block size divides the other.
        """
        size = self.block_size or session.block_size
        if size % session.block_size and session.block_size % size:
            message = f"blocks of {session.block_size} tokens can be neither split into nor joined to blocks of {size}"
            raise BlockSizeError(f"session {session.id}: {message}; choose another format")
        if size == session.block_size and (not self.shared or session.scope is BlockScope.GLOBAL):
            return session
        if not self.shared:
            self._names.clear()
        own: str | None = None if session.scope is BlockScope.GLOBAL else session.id
        tree = SessionTree.of(session) if size < session.block_size else None

        def flow(old: Flow) -> Flow:
            turns: list[Turn] = []
            before = named = NO_IDS
            for turn in old.turns:
                # Most of a prompt was in the one before it, and is named already.
                kept = common_blocks(before, turn.block_ids)
                names = [self._name((own, block)) for block in turn.block_ids[kept:].tolist()]
                before, named = turn.block_ids, np.concatenate([named[:kept], np.array(names, dtype=np.int64)])
                turns.append(replace(turn, block_ids=self._ids(turn, named, session, size, own, tree)))
            return replace(old, turns=tuple(turns))

        return replace(
            session,
            block_size=size,
            scope=BlockScope.GLOBAL if self.shared else session.scope,
            main=flow(session.main),
            subagents=tuple(flow(f) for f in session.subagents),
        )

    def _ids(
        self, turn: Turn, named: BlockIds, session: Session, size: int, own: str | None, tree: SessionTree | None
    ) -> BlockIds:
        """Ids of one prompt's new blocks; ``named`` are numbers of its old ones."""
        full = turn.prompt_tokens // size
        if tree is None:
            step = size // session.block_size
            return named[step - 1 :: step][:full]
        parts = session.block_size // size
        last = int(turn.block_ids[-1]) if len(turn.block_ids) else ROOT
        child = tree.first_child.get(last)
        # A tail that nothing goes on from is the session's own, also where ids are global (``traces.tokens``).
        tail = self._name((own, child) if child is not None else (session.id, "after", last))
        blocks = np.append(named, tail) if full > len(named) * parts else named
        return (blocks[:, None] * parts + np.arange(parts)).reshape(-1)[:full]

    def _name(self, key: Hashable) -> int:
        return self._names.setdefault(key, len(self._names))


def coarser_loss(session: Session, block_size: int) -> int:
    """Turns whose longest prefix shared with earlier prompts of the session does not end with a block of that size."""
    if block_size <= session.block_size:
        return 0
    step = block_size // session.block_size
    known: set[int] = set()
    lost = 0
    for _, turn in session.turns_in_arrival_order():
        shared = known_prefix(turn.block_ids, known)
        lost += shared % step != 0
        known.update(turn.block_ids[shared:].tolist())
    return lost
