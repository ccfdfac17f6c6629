"""An infinite radix tree over token ids: how long a prefix of this prompt was seen before?

This is the yardstick of a *theoretical* hit rate (no capacity, instant insertion, page size 1), measured on
real tokens. ``radix_cache.theory`` computes the same lengths from block ids alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]


class _Node:
    """``tokens`` label the edge from the parent; ``children`` are keyed by the first token of their edge."""

    __slots__ = ("children", "tokens")

    def __init__(self, tokens: TokenIds) -> None:
        self.tokens = tokens
        self.children: dict[int, _Node] = {}


def common_length(a: TokenIds, b: TokenIds) -> int:
    """Length of the longest common prefix of two token arrays, in tokens."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


class TokenPrefixIndex:
    """Every sequence ever inserted, each distinct prefix stored once.

    Sequences are one-dimensional int32 arrays. The index copies what it keeps, so callers may reuse theirs.
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, dtype=np.int32))
        self._size = 0

    def __len__(self) -> int:
        """Distinct tokens stored: the sum of all edge lengths."""
        return self._size

    def longest_prefix(self, tokens: TokenIds) -> int:
        """Length in tokens of the longest prefix of ``tokens`` that is a prefix of an inserted sequence."""
        _, _, matched = self._walk(_as_tokens(tokens))
        return matched

    def insert(self, tokens: TokenIds) -> None:
        """Add a sequence (and with it all its prefixes); adding a known one changes nothing."""
        tokens = _as_tokens(tokens)
        node, on_edge, matched = self._walk(tokens)
        if matched == len(tokens):
            return
        if on_edge < len(node.tokens):
            _split(node, on_edge)
        # A copy: a view of the suffix would keep the whole prompt alive, and memory would grow quadratically
        # with the turns of a conversation.
        node.children[int(tokens[matched])] = _Node(tokens[matched:].copy())
        self._size += len(tokens) - matched

    def _walk(self, tokens: TokenIds) -> tuple[_Node, int, int]:
        """(node reached, tokens matched on that node's own edge, tokens matched in all)."""
        node, matched = self._root, 0
        while matched < len(tokens):
            child = node.children.get(int(tokens[matched]))
            if child is None:
                break
            common = common_length(child.tokens, tokens[matched:])
            matched += common
            node = child
            if common < len(child.tokens):
                return node, common, matched
        return node, len(node.tokens), matched


def _split(node: _Node, at: int) -> None:
    lower = _Node(node.tokens[at:])
    lower.children = node.children
    node.tokens = node.tokens[:at]
    node.children = {int(lower.tokens[0]): lower}


def _as_tokens(tokens: TokenIds) -> TokenIds:
    if tokens.ndim != 1 or tokens.dtype != np.int32:
        raise ValueError(f"need a 1-d int32 array of token ids, got {tokens.dtype} with shape {tokens.shape}")
    return tokens
