"""Theoretical prefix lengths from block ids alone: infinite cache, instant insertion, no tokens needed.

Ids are chained: an id names a full block together with everything before it. The last, partial block of a
prompt has no id. What its tokens are follows the rules of ``traces.tokens`` (a test holds the two together):

- A prompt whose full blocks end at node p goes on in p's continuation stream; the first child of p *is* that
  stream, later children differ from it in their first token.
- An output continues the stream too, as in the recorded conversation. Of ``o`` output tokens ``o - 1`` leave
  KV behind: the last one is sampled but never run through the model.

So next to the known ids it is enough to remember, for each p without a child, how far its stream was filled.

State is per session and goes when ``SessionScan`` does. Only what sessions share stays in ``SharedPrefixes``:
two numbers per tools + system set-up, or the known ids where ids are global.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]
HeadKey = tuple[int, int]  # (tool_tokens, system_tokens)

ROOT = -1  # the parent of first blocks; real ids are not negative


class PromptShape(NamedTuple):
    """A request as far as prefixes are concerned."""

    block_ids: BlockIds  # ids of the full blocks, shape (prompt_tokens // block_size,)
    prompt_tokens: int
    output_tokens: int
    head: HeadKey = (0, 0)  # lengths of the tool definitions and the system prompt at its start


class PrefixLengths(NamedTuple):
    """Longest common prefixes with earlier requests, in tokens, at page size 1 and not capped."""

    session: int  # with earlier prompts of the session
    session_output: int  # with earlier prompts and outputs of the session
    shared: int  # as session; other sessions share the tools + system head (or global ids)
    shared_output: int  # as session_output, likewise


@dataclass(slots=True)
class SharedPrefixes:
    """What earlier sessions left for later ones.

    Attributes:
        global_ids: equal ids mean equal blocks across sessions. Then whole blocks are shared, and tails are
            not: a session does not know how another one's partial block goes on.
    """

    global_ids: bool = False
    _known: set[int] = field(default_factory=set)
    _heads: dict[HeadKey, int] = field(default_factory=dict)
    _heads_output: dict[HeadKey, int] = field(default_factory=dict)

    def match_blocks(self, ids: BlockIds) -> int:
        """Leading blocks that some session sent before; then remember all of them."""
        common = known_prefix(ids, self._known)
        self._known.update(ids[common:].tolist())
        return common

    def match_head(self, key: HeadKey, tokens: int, tokens_with_output: int) -> tuple[int, int]:
        """Leading head tokens that some session filled before, without and with outputs; then remember."""
        seen = self._heads.get(key, 0), self._heads_output.get(key, 0)
        self._heads[key] = max(seen[0], tokens)
        self._heads_output[key] = max(seen[1], tokens_with_output)
        return min(seen[0], tokens), min(seen[1], tokens)


class SessionScan:
    """Prefix lengths of one session's requests, fed in order of arrival.

    Args:
        block_size: tokens per block.
        shared: state that outlives the session; the ``shared`` lengths refer to it.
    """

    def __init__(self, block_size: int, shared: SharedPrefixes) -> None:
        self._block = block_size
        self._shared = shared
        self._known: set[int] = set()
        self._first_child: dict[int, int] = {}
        self._filled: dict[int, int] = {}  # childless node -> tokens of its stream seen in prompts
        self._filled_output: dict[int, int] = {}  # the same in prompts and outputs
        self._root_key: HeadKey | None = None
        self._head_paths: dict[int, tuple[HeadKey, BlockIds]] = {}

    def add(self, request: PromptShape) -> PrefixLengths:
        """Lengths for this request against all earlier ones; then remember it."""
        ids, prompt = request.block_ids, request.prompt_tokens
        if self._root_key is None:
            self._root_key = request.head
        common = known_prefix(ids, self._known)
        plain = self._reach(request, common, self._filled)
        output = self._reach(request, common, self._filled_output)
        self._insert(request, common)
        if self._shared.global_ids:
            across = self._shared.match_blocks(ids) * self._block
            return PrefixLengths(plain, output, max(plain, across), max(output, across))
        on_head, key = self._on_head(ids, prompt)
        filled = on_head
        if on_head == prompt < sum(key):
            filled = min(sum(key), prompt + max(0, request.output_tokens - 1))
        across, across_output = self._shared.match_head(key, on_head, filled)
        return PrefixLengths(plain, output, max(plain, across), max(output, across_output))

    def _reach(self, request: PromptShape, common: int, filled: dict[int, int]) -> int:
        ids = request.block_ids
        parent = int(ids[common - 1]) if common else ROOT
        at = common * self._block
        if parent not in self._first_child:
            return min(request.prompt_tokens, at + filled.get(parent, 0))
        # The stream after the parent is its first child: a tail begins like it, another block does not.
        return request.prompt_tokens if common == len(ids) else at

    def _insert(self, request: PromptShape, common: int) -> None:
        ids = request.block_ids
        new = ids[common:].tolist()
        if new:
            parent = int(ids[common - 1]) if common else ROOT
            if common == 0:
                self._claim_head(new[0], request.head)
            if parent not in self._first_child:
                self._first_child[parent] = new[0]
                for filled in (self._filled, self._filled_output):
                    beyond = filled.pop(parent, 0) - len(new) * self._block
                    if beyond > 0:
                        filled[new[-1]] = beyond
            self._first_child.update(itertools.pairwise(new))
            self._known.update(new)
        tail = request.prompt_tokens - len(ids) * self._block
        last = int(ids[-1]) if len(ids) else ROOT
        self._fill(self._filled, last, tail)
        self._fill(self._filled_output, last, tail + max(0, request.output_tokens - 1))

    def _fill(self, filled: dict[int, int], node: int, length: int) -> None:
        while length > 0 and node in self._first_child:
            node = self._first_child[node]
            length -= self._block
        if length > filled.get(node, 0):
            filled[node] = length

    def _claim_head(self, root_block: int, sender: HeadKey) -> None:
        """The first root block of a set-up carries its shared head, and first children go on with it."""
        key = sender if ROOT in self._first_child or self._root_key is None else self._root_key
        if sum(key) and all(key != other for other, _ in self._head_paths.values()):
            self._head_paths[root_block] = (key, np.array([root_block], dtype=np.int64))

    def _on_head(self, ids: BlockIds, prompt_tokens: int) -> tuple[int, HeadKey]:
        """How many leading tokens of a prompt lie on a shared head, and on which."""
        root_key = self._root_key or (0, 0)
        if not len(ids):
            return min(prompt_tokens, sum(root_key)), root_key
        root_block = int(ids[0])
        if root_block not in self._head_paths:
            return 0, root_key
        key, path = self._head_paths[root_block]
        if len(path) * self._block < sum(key):
            path = self._longer(path, sum(key))
            self._head_paths[root_block] = (key, path)
        common = common_blocks(path, ids)
        # A prompt that ends on the path has its tail there too: the tail begins the path's next block.
        on_path = prompt_tokens if common == len(ids) else common * self._block
        return min(on_path, sum(key)), key

    def _longer(self, path: BlockIds, tokens: int) -> BlockIds:
        blocks = path.tolist()
        while len(blocks) * self._block < tokens and blocks[-1] in self._first_child:
            blocks.append(self._first_child[blocks[-1]])
        return np.array(blocks, dtype=np.int64)


def known_prefix(ids: BlockIds, known: set[int]) -> int:
    """How many leading ids are known: a binary search, since ids are chained and the known ones a prefix."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if int(ids[middle]) in known:
            low = middle + 1
        else:
            high = middle
    return low


def common_blocks(a: BlockIds, b: BlockIds) -> int:
    """How many leading ids two prompts have in common."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n
