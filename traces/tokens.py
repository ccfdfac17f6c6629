"""Prompts rebuilt from block ids: same id, same tokens; different ids, different tokens.

A trace has no text, only chained block ids (``traces.model``). ``TokenBook`` gives every block of one session
its tokens, so that prompts of the recorded length share exactly the prefixes that the ids say. The rules:

1. *Tokens of a block* are a seeded hash of (salt, id, position). The salt is the session's id, or nothing but
   the seed where ids are global. They depend neither on Python's ``hash`` nor on the order of calls.
2. *Siblings* (different ids after the same parent) differ in their first token: the i-th child in recorded
   order of arrival takes the i-th free token after that of the first child. With more children than the
   vocabulary has tokens, first tokens repeat and the hash of the rest has to tell the blocks apart. Where ids
   are global a session does not know all siblings; there the first token is the id modulo the vocabulary.
3. *Tail.* The last, partial block has no id. The tail of a prompt whose full blocks end at node p is the
   beginning of p's *continuation stream*, and the first child of p in order of arrival *is* that stream: a
   turn that goes on from p really extends the tail. Later children of p diverge at their first token. Where
   p never gets a child the stream is a hash of (session, p), also where ids are global.
4. *History.* With ``recorded`` history the answer to a prompt is thought to be what the stream says: the next
   turn holds the tokens of its ids. With ``own`` history the answer that the server gave to a prompt of tail
   r takes the positions r, r + 1, ... of the stream and of the first children below it, as far as those were
   not sent yet. A block never changes once it was sent; before that the latest recorded answer wins. Lengths
   stay the recorded ones.
5. *Shared head.* With ``tools+system`` the first ``tool_tokens + system_tokens`` tokens come from a hash of
   these two numbers alone, so that all sessions of one set-up share them. They lie on one path of blocks per
   session and set-up: the first root block that a flow of that set-up sent, then first children. A prompt
   that leaves this path diverges as its ids say. The path of the root's first child belongs to the set-up of
   the session's first prompt.

A session of thousands of turns costs memory proportional to its distinct blocks, not to its prompts.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
import numpy.typing as npt

from radix_cache.theory import ROOT, HeadKey
from traces.model import BlockIds, BlockScope, Flow, Session, Turn
from traces.tree import SessionTree

TokenIds = npt.NDArray[np.int32]
PrefixSharing = Literal["session", "tools+system"]
History = Literal["recorded", "own"]


class TokenBook:
    """The tokens of one session's prompts.

    Args:
        session: a valid session (``traces.open_trace`` checks: chained ids, one per full block).
        seed: same seed, same tokens.
        vocab: half-open range ``(low, high)`` of the token ids to use, at least two of them.
        prefix_sharing: whether sessions of one tools + system set-up share that head.
        history: whether answers of the server become part of later prompts.

    Raises:
        ValueError: on a vocabulary of fewer than two tokens or beyond int32.
    """

    def __init__(
        self,
        session: Session,
        *,
        seed: int,
        vocab: tuple[int, int],
        prefix_sharing: PrefixSharing,
        history: History,
    ) -> None:
        low, high = vocab
        if not 0 <= low < high - 1 <= 2**31 - 1:
            raise ValueError(f"vocab must be a range of at least two int32 token ids, got {vocab}")
        self._low, self._span = low, high - low
        self._block = session.block_size
        self._seed = seed
        self._shared_heads = prefix_sharing == "tools+system"
        self._own_history = history == "own"
        self._global = session.scope is BlockScope.GLOBAL
        self._block_salt = _key(seed, "global") if self._global else _key(seed, "session", session.id)
        self._tail_salt = _key(seed, "tail", session.id)
        self._flows: dict[str, Flow] = {flow.name: flow for flow in session.flows()}
        self._tree = SessionTree.of(session)
        self._heads: dict[HeadKey, TokenIds] = {}
        self._first_tokens: dict[int, int] = {} if self._global else self._sibling_first_tokens()
        # Blocks that hold answers of the server; keys are ids, or ~p for the childless stream after p.
        self._answered: dict[int, TokenIds] = {}
        self._sent: set[int] = set()

    def prompt(self, flow_name: str, turn_index: int) -> TokenIds:
        """The prompt of one turn: int32, shape ``(turn.prompt_tokens,)``.

        With ``own`` history, call it when the turn is sent: its blocks are fixed from then on.

        Raises:
            KeyError, IndexError: no such flow or turn.
        """
        turn = self._turn(flow_name, turn_index)
        ids = turn.block_ids
        if self._own_history:
            self._make_way_for_answers(ids)
            self._sent.update(ids.tolist())
        tokens = np.empty(turn.prompt_tokens, dtype=np.int32)
        full = len(ids) * self._block
        tokens[:full] = self._blocks(ids).reshape(-1)
        if turn.prompt_tokens > full:
            tokens[full:] = self._stream(_last(ids))[: turn.prompt_tokens - full]
        on_head, key = self._head_of(turn)
        tokens[:on_head] = self._head(key)[:on_head]
        return tokens

    def record_output(self, flow_name: str, turn_index: int, tokens: TokenIds) -> None:
        """Tell what the server answered to a turn; matters only for ``own`` history (rule 4)."""
        if not self._own_history:
            return
        turn = self._turn(flow_name, turn_index)
        if self._ends_inside_head(turn):
            return  # the head is shared with other sessions, so answers must not change it
        node = _last(turn.block_ids)
        offset = turn.prompt_tokens - len(turn.block_ids) * self._block
        answer = np.asarray(tokens, dtype=np.int32)
        while len(answer):
            child = self._tree.first_child.get(node)
            part, answer = answer[: self._block - offset], answer[self._block - offset :]
            block = self._stream(node)
            if child is None or child not in self._sent:
                block[offset : offset + len(part)] = part
                self._answered[~node if child is None else child] = block
            elif not np.array_equal(block[offset : offset + len(part)], part):
                return  # the session went on differently; what follows is no continuation of this answer
            if child is None:
                return  # no prompt of the session reaches beyond this block
            node, offset = child, 0

    def continuation(self, flow_name: str, turn_index: int, length: int) -> TokenIds:
        """The ``length`` tokens that the stream has after a turn's prompt, int32: the recorded answer.

        A server that answers this leaves its output's KV where the next turn's prompt looks for it.
        """
        turn = self._turn(flow_name, turn_index)
        node, beyond = _last(turn.block_ids), 0
        skip = turn.prompt_tokens - len(turn.block_ids) * self._block
        parts: list[TokenIds] = []
        for _ in range(-(-(skip + length) // self._block)):
            parts.append(self._stream(node, beyond))
            child = self._tree.first_child.get(node)
            node, beyond = (node, beyond + 1) if child is None else (child, 0)
        whole: TokenIds = np.concatenate([*parts, np.empty(0, dtype=np.int32)])
        stream = whole[skip : skip + length]
        if self._ends_inside_head(turn):
            head = self._head(self._head_of(turn)[1])[turn.prompt_tokens : turn.prompt_tokens + length]
            stream[: len(head)] = head
        return stream

    def _turn(self, flow_name: str, turn_index: int) -> Turn:
        return self._flows[flow_name].turns[turn_index]

    def _blocks(self, ids: BlockIds) -> TokenIds:
        """Tokens of full blocks, shape ``(len(ids), block_size)``, before the shared head is laid over."""
        tokens = self._hashed(self._block_salt, ids)
        if self._global:
            tokens[:, 0] = self._low + (ids + self._block_salt % self._span) % self._span
        if self._first_tokens or self._answered:
            for row, block in enumerate(ids.tolist()):
                if block in self._answered:
                    tokens[row] = self._answered[block]
                elif block in self._first_tokens:
                    tokens[row, 0] = self._first_tokens[block]
        return tokens

    def _stream(self, parent: int, beyond: int = 0) -> TokenIds:
        """One block (a copy) of the stream after ``parent``: its first child, or the hash where it has none.

        ``beyond`` counts blocks further down a childless stream.
        """
        child = self._tree.first_child.get(parent)
        if child is not None:
            return _row(self._blocks(np.array([child], dtype=np.int64)))
        if beyond == 0 and ~parent in self._answered:
            return self._answered[~parent].copy()
        return _row(self._hashed(self._tail_salt, np.array([parent], dtype=np.int64), beyond * self._block))

    def _hashed(self, salt: int, ids: BlockIds, start: int = 0) -> TokenIds:
        return _tokens(salt, ids, start, self._block, self._low, self._span)

    def _head_of(self, turn: Turn) -> tuple[int, HeadKey]:
        on_head, key = self._tree.head(turn.block_ids, turn.prompt_tokens)
        return (on_head if self._shared_heads else 0), key

    def _ends_inside_head(self, turn: Turn) -> bool:
        on_head, key = self._head_of(turn)
        return on_head == turn.prompt_tokens < sum(key)

    def _head(self, key: HeadKey) -> TokenIds:
        if key not in self._heads:
            salt = _key(self._seed, "head", *key)
            zero = np.zeros(1, dtype=np.int64)
            self._heads[key] = _row(_tokens(salt, zero, 0, sum(key), self._low, self._span))
        return self._heads[key]

    def _sibling_first_tokens(self) -> dict[int, int]:
        """First tokens of blocks whose hash must give way to that of an older sibling (rule 2)."""
        tree = self._tree
        on_head: dict[int, int] = {}  # block -> its first token in the shared head
        for key, path in tree.head_paths.values() if self._shared_heads else ():
            # The path is shorter than the head where the session never sent all of it.
            on_head.update(zip(path.tolist(), self._head(key)[:: self._block].tolist(), strict=False))
        chosen: dict[int, int] = {}
        for parent, later in tree.later_children.items():
            eldest = tree.first_child[parent]
            natural = self._natural_first_token(eldest)
            taken = {on_head[block] for block in (eldest, *later) if block in on_head}
            token = natural
            for child in later:
                if child in on_head:
                    continue
                for _ in range(len(taken) + 1):  # enough to find a free token if there is one
                    token = self._low + (token - self._low + 1) % self._span
                    if token not in taken:
                        break
                chosen[child] = token
        return chosen

    def _make_way_for_answers(self, ids: BlockIds) -> None:
        """An answer may begin like a later sibling of its block; that one takes the token it left free."""
        if not self._answered or not self._first_tokens:
            return
        parent = ROOT
        for block in ids.tolist():
            if block in self._first_tokens and block not in self._sent:
                eldest = self._tree.first_child[parent]
                answer = self._answered.get(eldest)
                if answer is not None and int(answer[0]) == self._first_tokens[block]:
                    self._first_tokens[block] = self._natural_first_token(eldest)
            parent = block

    def _natural_first_token(self, block: int) -> int:
        return int(self._hashed(self._block_salt, np.array([block], dtype=np.int64))[0, 0])


def _row(tokens: TokenIds) -> TokenIds:
    row: TokenIds = tokens[0].copy()
    return row


def _last(ids: BlockIds) -> int:
    return int(ids[-1]) if len(ids) else ROOT


def _key(*parts: int | str) -> int:
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _tokens(salt: int, ids: BlockIds, start: int, width: int, low: int, span: int) -> TokenIds:
    """Hash of (salt, id, position), position in ``start .. start + width``; shape ``(len(ids), width)``."""
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        keys = _mix(_mix(ids.astype(np.uint64)) + np.uint64(salt))
        positions = np.arange(start, start + width, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits = _mix(keys[:, None] + positions) >> np.uint64(32)
    # Multiply-and-shift maps 32 random bits to the range without a division.
    return (low + ((bits * np.uint64(span)) >> np.uint64(32)).astype(np.int64)).astype(np.int32)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
