"""One call of a model as a client logged it, in one shape for all formats; its prompt without a chat template. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from eval.diagnose.prompt import Kind, Piece, Prompt, prompt_of_text
from traces.logs.messages import Message, ToolCall

__all__ = ["Call", "Message", "Request", "ToolCall", "render"]


@dataclass(frozen=True)
class Request:
    """What a client sent: messages and tools, or a text or tokens that are already a prompt."""

    messages: tuple[Message, ...] = ()
    tools: tuple[str, ...] = ()  # each as JSON with its keys in the order sent
    text: str | None = None
    ids: tuple[int, ...] | None = None
    compacted: bool = False  # a summary took the place of what was before

    def reasoning_sent(self) -> frozenset[str]:
        return frozenset(m.reasoning.strip() for m in self.messages if m.reasoning)


@dataclass(frozen=True)
class Call:
    """One request with what came back.

    Attributes:
        where: ``FILE:LINE``.
        session: as the log names the conversation; None: it does not.
        prompt_tokens, cached_tokens: as the server counted them; None: not logged.
        at_s: when it was sent, or logged, in seconds since 1970.
    """

    where: str
    request: Request
    session: str | None = None
    answer: tuple[Message, ...] = ()
    answer_text: str | None = None
    answer_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    at_s: float | None = None
    model: str = ""

    def digests(self) -> list[bytes]:
        """What a conversation is recognized by: user messages and tool results; of a bare text its lines."""
        if self.request.messages:
            return [_digest(m.content) for m in self.request.messages if m.role in ("user", "tool") and m.content]
        if self.request.ids is not None:
            ids = self.request.ids
            return [_digest(repr(ids[i : i + _IDS])) for i in range(0, len(ids) - _IDS + 1, _IDS)]
        pieces = prompt_of_text(self.request.text or "").pieces
        told = [p.text for p in pieces if p.kind in (Kind.USER, Kind.RESULT)]
        if len(pieces) <= 1:  # no markers
            told = (self.request.text or "").splitlines()
        return [_digest(text) for text in told if len(text) > _SHORTEST_TEXT]


_SHORTEST_TEXT = 8  # characters
_IDS = 32  # tokens that are recognized together


def render(request: Request, answer: tuple[Message, ...] = ()) -> Prompt:
    """The prompt as text without a chat template: what was sent, in the order in which templates write it.

    Args:
        request: with messages, or a text.
        answer: is appended.
    """
    if request.text is not None:
        return prompt_of_text(request.text)
    pieces = [Piece(Kind.TOOLS, tool + "\n", -1) for tool in request.tools]
    for index, message in enumerate((*request.messages, *answer)):
        pieces += _pieces(message, index)
    return Prompt(tuple(pieces), reasoning_sent=request.reasoning_sent(), compacted=request.compacted)


_KINDS = {"system": Kind.SYSTEM, "developer": Kind.SYSTEM, "assistant": Kind.ANSWER, "tool": Kind.RESULT}


def _pieces(message: Message, index: int) -> Iterable[Piece]:
    yield Piece(Kind.MARK, f"<|{message.role}|>\n", index)
    if message.reasoning is not None:
        yield Piece(Kind.THINK, f"<think>{message.reasoning}</think>", index)
    if message.content:
        yield Piece(_KINDS.get(message.role, Kind.USER), message.content, index)
    for call in message.calls:
        yield Piece(Kind.CALL, f"<tool_call>{call.name}{call.arguments}</tool_call>", index)
    yield Piece(Kind.MARK, "\n", index)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()
