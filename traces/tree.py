"""The tree that the chained block ids of one session span, in recorded order of arrival."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from radix_cache.theory import ROOT, HeadKey, common_blocks, known_prefix
from traces.model import BlockIds, Flow, Session


@dataclass(slots=True)
class SessionTree:
    """Who is whose child, and which path of blocks holds the tools + system head of each set-up.

    Attributes:
        block_size: tokens per block.
        first_child: parent id -> the child that arrived first.
        later_children: parent id -> its other children, in order of arrival; only where there are any.
        root_key: set-up of the session's first prompt, to which the path of the root's first child belongs.
        head_paths: root block -> (set-up, ids of the blocks that hold its head; the last may do so in part).
    """

    block_size: int
    root_key: HeadKey
    first_child: dict[int, int] = field(default_factory=dict)
    later_children: dict[int, list[int]] = field(default_factory=dict)
    head_paths: dict[int, tuple[HeadKey, BlockIds]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> SessionTree:
        """Build it with one look at every distinct block; relies on ids being chained."""
        turns = session.turns_in_arrival_order()
        tree = cls(session.block_size, head_key(turns[0][0]))
        known: set[int] = set()
        sent_by: dict[int, HeadKey] = {}
        for flow, turn in turns:
            start = known_prefix(turn.block_ids, known)
            new = turn.block_ids[start:].tolist()
            if not new:
                continue
            parent = int(turn.block_ids[start - 1]) if start else ROOT
            if start == 0:
                sent_by[new[0]] = head_key(flow)
            if parent in tree.first_child:
                tree.later_children.setdefault(parent, []).append(new[0])
            else:
                tree.first_child[parent] = new[0]
            # Below a new block everything is new, so every one of these is a first child.
            tree.first_child.update(itertools.pairwise(new))
            known.update(new)
        tree._find_head_paths(sent_by)
        return tree

    def head(self, ids: BlockIds, prompt_tokens: int) -> tuple[int, HeadKey]:
        """How many leading tokens of a prompt lie on the head path of a set-up, and of which."""
        if not len(ids):
            return min(prompt_tokens, sum(self.root_key)), self.root_key
        if int(ids[0]) not in self.head_paths:
            return 0, self.root_key
        key, path = self.head_paths[int(ids[0])]
        common = common_blocks(path, ids)
        # A prompt that ends on the path has its tail there too: the tail begins the path's next block.
        on_path = prompt_tokens if common == len(ids) else common * self.block_size
        return min(on_path, sum(key)), key

    def _find_head_paths(self, sent_by: dict[int, HeadKey]) -> None:
        claimed: set[HeadKey] = set()
        for nth, (root_block, sender) in enumerate(sent_by.items()):
            key = self.root_key if nth == 0 else sender
            if key in claimed or not sum(key):
                continue
            claimed.add(key)
            path: list[int] = []
            block: int | None = root_block
            while block is not None and len(path) * self.block_size < sum(key):
                path.append(block)
                block = self.first_child.get(block)
            self.head_paths[root_block] = (key, np.array(path, dtype=np.int64))


def head_key(flow: Flow) -> HeadKey:
    return flow.tool_tokens, flow.system_tokens
