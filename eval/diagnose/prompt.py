"""A prompt as text in pieces, so that a rule can ask what kind of text differs. Pure.

Pieces come from messages (``chat.py``) or from the markers that chat templates write into a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple


class Kind(StrEnum):
    """What a piece of a prompt is."""

    TOOLS = "tool definitions"
    SYSTEM = "system prompt"
    USER = "user message"
    THINK = "think block"
    ANSWER = "answer"
    CALL = "tool call"
    RESULT = "tool result"
    MARK = "template marker"


class Piece(NamedTuple):
    """Consecutive text of one kind."""

    kind: Kind
    text: str
    message: int  # index of its message in the prompt; -1: tool definitions


class Tokens(NamedTuple):
    """A text's token ids, and the character behind each token; None where nobody knows it."""

    ids: Sequence[int]
    ends: Sequence[int] | None = None


Tokenize = Callable[[str], Tokens]


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt.

    Attributes:
        pieces: in order; their texts joined are the prompt.
        tokens: as the server saw them, where that is known.
        reasoning_sent: reasoning texts (stripped) that the client sent, whatever the template made of them.
        compacted: the client says that a summary took the place of the history before this prompt.
    """

    pieces: tuple[Piece, ...]
    tokens: Tokens | None = None
    reasoning_sent: frozenset[str] = field(default_factory=frozenset)
    compacted: bool = False

    @cached_property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @cached_property
    def ends(self) -> list[int]:
        """Character behind each piece."""
        return list(accumulate(len(piece.text) for piece in self.pieces))


# (opening, closing, kind): blocks that stand inside a message. M3, Qwen, DeepSeek, GLM, Hermes and tiny templates.
_BLOCKS: tuple[tuple[str, str, Kind], ...] = (
    ("<mm:think>", "</mm:think>", Kind.THINK),
    ("<think>", "</think>", Kind.THINK),
    ("<tools>", "</tools>", Kind.TOOLS),
    ("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>", Kind.CALL),
    ("<tool_call>", "</tool_call>", Kind.CALL),
    ("<tool_response>", "</tool_response>", Kind.RESULT),
)
THINK_OPENINGS = tuple(opening for opening, _, kind in _BLOCKS if kind is Kind.THINK)
THINK_CLOSINGS = tuple(closing for _, closing, kind in _BLOCKS if kind is Kind.THINK)

_ROLES = {
    "system": Kind.SYSTEM,
    "developer": Kind.SYSTEM,
    "user": Kind.USER,
    "human": Kind.USER,
    "assistant": Kind.ANSWER,
    "ai": Kind.ANSWER,
    "model": Kind.ANSWER,
    "tool": Kind.RESULT,
    "function": Kind.RESULT,
}
_ROLE_NAMES = "|".join(_ROLES)
_HEADER = re.compile(
    rf"(?:\]~b\]|<\|im_start\|>|<start_of_turn>|<\|)(?P<role>{_ROLE_NAMES})(?:\|>)?\n?"
    r"|(?P<end>\[e~\[\n?|<\|im_end\|>\n?|<\|end\|>\n?|<end_of_turn>\n?)"
)


def prompt_of_text(text: str, tokens: Tokens | None = None) -> Prompt:
    """A prompt of which only the text is known; kinds follow from the markers in it.

    Args:
        text: as the model sees it.
        tokens: its tokens, where known; ``ends`` count characters of ``text``.
    """
    pieces: list[Piece] = []
    kind, message, start = Kind.USER, 0, 0
    for match in _HEADER.finditer(text):
        pieces += _with_blocks(text[start : match.start()], kind, message)
        role = match["role"]
        if role is None:
            pieces.append(Piece(Kind.MARK, match[0], message))
        else:
            message += bool(pieces)
            kind = _ROLES[role]
            pieces.append(Piece(Kind.MARK, match[0], message))
        start = match.end()
    pieces += _with_blocks(text[start:], kind, message)
    return Prompt(tuple(pieces), tokens)


def _with_blocks(text: str, kind: Kind, message: int) -> Iterator[Piece]:
    """The blocks of one message's text. A block that is never closed reaches to the end of the message."""
    while text:
        found = [(at, block) for block in _BLOCKS if (at := text.find(block[0])) >= 0]
        if not found:
            yield Piece(kind, text, message)
            return
        at, (opening, closing, inner) = min(found, key=lambda item: item[0])
        if at:
            yield Piece(kind, text[:at], message)
        end = text.find(closing, at + len(opening))
        end = len(text) if end < 0 else end + len(closing)
        yield Piece(inner, text[at:end], message)
        text = text[end:]


def common_prefix(one: str, other: str) -> int:
    """Characters that both begin with; by halving, so that equal parts are compared at the speed of memory."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_ids(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
