"""Messages of three APIs in one shape: OpenAI chat completions, OpenAI responses (and Codex), Anthropic messages. Pure.

Texts are kept as they were sent: the arguments of a tool call with their keys' order and spacing, an empty think
block apart from none. What is not text (images, audio, files, encrypted reasoning) stands as ``[type digest]``: equal
where it is equal, with a length that says nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from traces.logs.fields import FieldError, get

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")
_ANTHROPIC = ("tool_use", "tool_result", "thinking", "redacted_thinking")


class ToolCall(NamedTuple):
    """A call as the text that was sent; ``arguments`` is JSON for most models."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; texts as they were sent.

    Attributes:
        content: all text of it.
        reasoning: text of its think block; None: no such field; an empty text is an empty block.
        call_id: of a tool result.
        parts: the texts of a content of several parts, of which ``content`` is the sum; else empty.
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    parts: tuple[str, ...] = ()

    def as_openai(self) -> dict[str, Any]:
        """For a chat template. Arguments that are an object in JSON become it, as SGLang hands them to templates."""
        content = [{"type": "text", "text": part} for part in self.parts] if self.parts else self.content
        made: dict[str, Any] = {"role": self.role, "content": content}
        if self.reasoning is not None:
            made["reasoning_content"] = self.reasoning
        if self.call_id:
            made["tool_call_id"] = self.call_id
        if self.calls:
            made["tool_calls"] = [
                {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": _parsed(c.arguments)}}
                for c in self.calls
            ]
        return made


def joined(pieces: Sequence[Message]) -> Message:
    """One message of an answer that a log holds in pieces; at least one."""
    if len(pieces) == 1:
        return pieces[0]
    thoughts = [piece.reasoning for piece in pieces if piece.reasoning is not None]
    return Message(
        role=pieces[0].role,
        content="".join(piece.content for piece in pieces),
        reasoning="\n".join(filter(None, thoughts)) if thoughts else None,
        calls=tuple(call for piece in pieces for call in piece.calls),
        call_id=pieces[0].call_id,
    )


def chat_messages(values: Any, at: str = "messages") -> tuple[Message, ...]:
    """``messages`` of a chat completion or of Anthropic's API.

    Raises:
        FieldError: no list of messages with roles.
    """
    if not isinstance(values, list) or not values:
        raise FieldError(at, "must be a list of at least one message")
    made: list[Message] = []
    for index, value in enumerate(values):
        try:
            made += _chat_message(value)
        except FieldError as error:
            raise error.within(f"{at}[{index}]") from None
    return tuple(made)


def chat_answer(value: Any, at: str) -> Message:
    """The message of an answer, whose role may be missing. Raises FieldError."""
    try:
        return joined(list(_chat_message({"role": "assistant", **value} if isinstance(value, dict) else value)))
    except FieldError as error:
        raise error.within(at) from None


def _chat_message(value: Any) -> Iterator[Message]:
    if not isinstance(value, dict):
        raise FieldError("", "must be an object with a role")
    role = get(value, "role", str)
    if not role:
        raise FieldError("role", "is missing")
    content = value.get("content")
    if isinstance(content, list) and any(isinstance(b, dict) and b.get("type") in _ANTHROPIC for b in content):
        yield from anthropic_messages(role, content, "content")
        return
    reasoning = get(value, "reasoning_content", str)
    calls = get(value, "tool_calls", list) or ()
    yield Message(
        role="tool" if role == "function" else role,
        content=text_of(content),
        reasoning=get(value, "reasoning", str) if reasoning is None else reasoning,
        calls=tuple(_chat_call(call, index) for index, call in enumerate(calls)),
        call_id=get(value, "tool_call_id", str) or "",
        parts=tuple(map(_part_text, content)) if isinstance(content, list) and len(content) > 1 else (),
    )


def _chat_call(value: Any, index: int) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise FieldError(f"tool_calls[{index}].function", "must be an object" if function else "is missing")
    try:
        return ToolCall(
            get(function, "name", str) or "", _as_text(function.get("arguments")), get(value, "id", str) or ""
        )
    except FieldError as error:
        raise error.within(f"tool_calls[{index}]") from None


def anthropic_messages(role: str, content: Any, at: str) -> Iterator[Message]:
    """A message of Anthropic's API: each tool result a message of its own, then what is left as one.

    Raises:
        FieldError: neither text nor a list of blocks.
    """
    if content is None or isinstance(content, str):
        yield Message(role, content or "")
        return
    if not isinstance(content, list):
        raise FieldError(at, "must be text or a list of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(content):
        if not isinstance(block, dict):
            raise FieldError(f"{at}[{index}]", "must be an object")
        try:
            match block.get("type"):
                case "thinking":
                    thoughts.append(get(block, "thinking", str) or "")
                case "redacted_thinking":
                    thoughts.append(_digest(block))
                case "tool_use":
                    name = get(block, "name", str) or ""
                    calls.append(ToolCall(name, _as_text(block.get("input")), get(block, "id", str) or ""))
                case "tool_result":
                    yield Message("tool", text_of(block.get("content")), call_id=get(block, "tool_use_id", str) or "")
                case _:
                    texts.append(_part_text(block))
        except FieldError as error:
            raise error.within(f"{at}[{index}]") from None
    if texts or thoughts or calls:
        reasoning = "\n".join(filter(None, thoughts)) if thoughts else None
        yield Message(role, "".join(texts), reasoning, tuple(calls))


def response_items(values: Any, at: str) -> tuple[Message, ...]:
    """Items of OpenAI's responses API, or a text that stands for a message of the user. Raises FieldError."""
    if isinstance(values, str):
        return (Message("user", values),)
    if not isinstance(values, list):
        raise FieldError(at, "must be text or a list of items")
    made = [response_item(value, f"{at}[{index}]") for index, value in enumerate(values)]
    return tuple(message for message in made if message is not None)


def response_item(value: Any, at: str) -> Message | None:
    """One item, as Codex logs it too; None for one that is no part of a prompt. Raises FieldError."""
    if not isinstance(value, dict):
        raise FieldError(at, "must be an object")
    try:
        return _item(value)
    except FieldError as error:
        raise error.within(at) from None


def _item(value: dict[str, Any]) -> Message | None:
    kind = get(value, "type", str) or "message"
    call_id = get(value, "call_id", str) or ""
    if kind == "message":
        role = get(value, "role", str)
        if not role:
            raise FieldError("role", "is missing")
        return Message(role, text_of(value.get("content")))
    if kind == "reasoning":
        shown = text_of(value.get("content")) or text_of(value.get("summary"), "summary")
        encrypted = value.get("encrypted_content")
        return Message("assistant", reasoning=shown or ("" if encrypted is None else _digest(encrypted)))
    if kind in ("function_call", "custom_tool_call"):
        arguments = _as_text(value.get("arguments" if kind == "function_call" else "input"))
        return Message("assistant", calls=(ToolCall(get(value, "name", str) or "", arguments, call_id),))
    if kind.endswith("_call_output"):
        return Message("tool", _as_text(value.get("output")), call_id=call_id)
    if kind.endswith("_call"):
        return Message("assistant", calls=(ToolCall(kind, _as_text(value.get("action")), call_id),))
    return None


def text_of(content: Any, at: str = "content") -> str:
    """All text of a content: a text, a list of parts, or nothing. Raises FieldError for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(_part_text, content))
    raise FieldError(at, "must be text or a list of parts")


def openai_dicts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """For a chat template."""
    return [message.as_openai() for message in messages]


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in _TEXTS and isinstance(part.get("text"), str):
        return str(part["text"])
    return _digest(part)


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(orjson.dumps(value), digest_size=8).hexdigest()
    kind = value.get("type") if isinstance(value, dict) else None
    return f"[{kind if isinstance(kind, str) else 'part'} {digest}]"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _parsed(arguments: str) -> Any:
    if not arguments:
        return {}
    try:
        found = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return found if isinstance(found, dict) else arguments
