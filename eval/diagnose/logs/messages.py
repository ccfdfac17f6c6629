"""Messages of three APIs in one shape: OpenAI chat completions, OpenAI responses (and Codex), Anthropic messages. Pure.

What is not text (images, audio, files) stands as a digest, so that a change of it is seen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from eval.diagnose.chat import Message, ToolCall
from eval.diagnose.logs.base import LogError, field

_TEXTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def chat_messages(values: Any) -> tuple[Message, ...]:
    """``messages`` of a chat completion or of Anthropic's API. Raises LogError naming the message."""
    if not isinstance(values, list):
        raise LogError("field 'messages' is no list")
    made: list[Message] = []
    for index, value in enumerate(values):
        try:
            made += _chat_message(value)
        except LogError as error:
            raise LogError(f"messages[{index}]: {error}") from None
    return tuple(made)


def _chat_message(value: Any) -> Iterator[Message]:
    if not isinstance(value, dict):
        raise LogError("no object")
    role = field(value, "role", str)
    if role is None:
        raise LogError("field 'role' is missing")
    content = value.get("content")
    blocks = content if isinstance(content, list) else ()
    if any(isinstance(b, dict) and b.get("type") in ("tool_use", "tool_result", "thinking") for b in blocks):
        yield from anthropic_message(role, blocks)
        return
    reasoning = next((value[k] for k in ("reasoning_content", "reasoning") if isinstance(value.get(k), str)), None)
    calls = field(value, "tool_calls", list) or ()
    yield Message(
        role="tool" if role == "function" else role,
        content=text_of(content),
        reasoning=reasoning,
        calls=tuple(_chat_call(call) for call in calls),
        call_id=field(value, "tool_call_id", str) or "",
    )


def _chat_call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise LogError("tool_calls: an entry without 'function'")
    return ToolCall(
        field(function, "name", str) or "", _as_text(function.get("arguments")), field(value, "id", str) or ""
    )


def anthropic_message(role: str, blocks: Iterable[Any]) -> Iterator[Message]:
    """A message as content blocks: tool results first, as messages of their own, then what is left."""
    reasoning: list[str] = []
    text: list[str] = []
    calls: list[ToolCall] = []
    for block in blocks:
        if not isinstance(block, dict):
            raise LogError("content: a block that is no object")
        match block.get("type"):
            case "thinking":
                reasoning.append(field(block, "thinking", str) or "")
            case "redacted_thinking":
                reasoning.append(_digest_of(block))
            case "tool_use":
                name = field(block, "name", str) or ""
                calls.append(ToolCall(name, _as_text(block.get("input")), field(block, "id", str) or ""))
            case "tool_result":
                yield Message("tool", text_of(block.get("content")), call_id=field(block, "tool_use_id", str) or "")
            case _:
                text.append(text_of([block]))
    if reasoning or text or calls:
        yield Message(role, "".join(text), "\n".join(reasoning) if reasoning else None, tuple(calls))


def response_items(values: Any) -> tuple[Message, ...]:
    """``input`` of the responses API: a text, or items. Raises LogError naming the item."""
    if isinstance(values, str):
        return (Message("user", values),)
    if not isinstance(values, list):
        raise LogError("field 'input' is neither text nor list")
    made = []
    for index, value in enumerate(values):
        try:
            message = response_item(value)
        except LogError as error:
            raise LogError(f"input[{index}]: {error}") from None
        if message is not None:
            made.append(message)
    return tuple(made)


def response_item(value: Any) -> Message | None:
    """One item; None for one that is no part of a prompt."""
    if not isinstance(value, dict):
        raise LogError("no object")
    kind = field(value, "type", str) or "message"
    call_id = field(value, "call_id", str) or ""
    if kind == "message":
        role = field(value, "role", str)
        if role is None:
            raise LogError("field 'role' is missing")
        return Message(role, text_of(value.get("content")))
    if kind == "reasoning":
        shown = text_of(value.get("content")) or text_of(value.get("summary"))
        return Message("assistant", reasoning=shown or _digest_of(value.get("encrypted_content")))
    if kind in ("function_call", "custom_tool_call"):
        arguments = _as_text(value.get("arguments" if kind == "function_call" else "input"))
        return Message("assistant", calls=(ToolCall(field(value, "name", str) or "", arguments, call_id),))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", _as_text(value.get("output")), call_id=call_id)
    if kind.endswith("_call"):
        return Message("assistant", calls=(ToolCall(kind, _as_text(value.get("action")), call_id),))
    return None


def system_message(value: Any) -> tuple[Message, ...]:
    """``system`` or ``instructions``: none, a text, or blocks."""
    text = text_of(value)
    return (Message("system", text),) if text else ()


def tool_texts(value: dict[str, Any]) -> tuple[str, ...]:
    """``tools`` as JSON texts with the keys in the order sent."""
    tools = field(value, "tools", list) or ()
    return tuple(orjson.dumps(tool).decode() for tool in tools)


def text_of(content: Any) -> str:
    """Text of a message's content: a string, blocks, or nothing."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_block_text(block) for block in content)
    raise LogError(f"field 'content' is {type(content).__name__}")


def _block_text(block: Any) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, dict) and block.get("type", "text") in _TEXTS and isinstance(block.get("text"), str):
        return str(block["text"])
    return _digest_of(block)


def _digest_of(value: Any) -> str:
    if value is None:
        return ""
    digest = hashlib.blake2b(orjson.dumps(value), digest_size=8).hexdigest()
    kind = value.get("type", "block") if isinstance(value, dict) else "block"
    return f"[{kind} {digest}]"


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()
