"""A trace without what could be recognised, and with everything that a prefix cache sees. Pure.

Block ids become keyed hashes (BLAKE2b): who has the key finds a block again, nobody else can, not even by hashing
guesses. Equal prefixes stay equal, different ones different, so every theoretical rate stays what it was. Names of
sessions and subagents become keyed hashes and numbers, models and sources are dropped, and all times are moved by
one secret shift. Lengths, gaps, stop reasons and the structure stay: they are what a trace is for, and they may be
telling.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from radix_cache.theory import common_blocks
from traces.model import BlockIds, BlockScope, Flow, Session, Turn

MAX_SHIFT_S = 86_400
MIN_KEY_BYTES = 16
NO_IDS: BlockIds = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Anonymizer:
    """Rewrites sessions under one key.

    Args:
        key: secret, at least ``MIN_KEY_BYTES`` long. The same key gives the same result; a key that is thrown away
            makes the result final.

    Raises:
        ValueError: the key is too short.
    """

    key: bytes
    _ids: dict[int, int] = field(default_factory=dict)
    _taken: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_BYTES:
            raise ValueError(f"a key needs at least {MIN_KEY_BYTES} bytes, this one has {len(self.key)}")
        self.key = hashlib.blake2b(self.key, digest_size=32).digest()

    def session(self, session: Session) -> Session:
        """The session without names, in ids and times of its own."""
        shared = session.scope is BlockScope.GLOBAL
        if not shared:
            self._ids.clear()
            self._taken.clear()
        space = "" if shared else session.id
        # Where sessions have a clock of their own, it starts with them: there is nothing to hide.
        shift = self._hash("times", "") % (MAX_SHIFT_S * 1000) / 1000 if shared else 0.0

        def flow(old: Flow, name: str) -> Flow:
            turns: list[Turn] = []
            for at, turn in enumerate(old.turns):
                before = (old.turns[at - 1].block_ids, turns[-1].block_ids) if at else (NO_IDS, NO_IDS)
                ids = self._rekeyed(turn.block_ids, space, *before)
                turns.append(replace(turn, block_ids=ids, start_s=turn.start_s + shift, model=""))
            return replace(old, name=name, turns=tuple(turns), start_s=old.start_s + shift)

        return replace(
            session,
            id=f"{self._hash('session', session.id):016x}",
            main=flow(session.main, session.main.name),
            subagents=tuple(flow(f, f"agent-{at}") for at, f in enumerate(session.subagents, 1)),
            source="",
        )

    def _rekeyed(self, ids: BlockIds, space: str, before: BlockIds, before_rekeyed: BlockIds) -> BlockIds:
        kept = common_blocks(ids, before)
        new = [self._ids.get(block) or self._new(block, space) for block in ids[kept:].tolist()]
        return np.concatenate([before_rekeyed[:kept], np.array(new, dtype=np.int64)])

    def _new(self, block: int, space: str) -> int:
        attempt = 0
        # Two blocks must not get one id, however unlikely that is among 63 bits; 0 stands for "not there yet".
        while (name := self._hash("block", f"{space}|{block}|{attempt}")) in self._taken or not name:
            attempt += 1
        self._taken.add(name)
        self._ids[block] = name
        return name

    def _hash(self, what: str, text: str) -> int:
        digest = hashlib.blake2b(f"{what}|{text}".encode(), key=self.key, digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1
