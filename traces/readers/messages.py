"""Messages of three APIs as OpenAI chat messages, the form that chat templates take. Pure.

``content`` is text or a list of text parts, ``tool_calls`` hold their arguments as objects where they are JSON
objects (as servers hand them to a template), ``reasoning_content`` is the text of a think block. What is not text
(images, audio, files, encrypted reasoning) stands as ``[type digest]``: equal where it is equal, with a length that
says nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import orjson

from traces.text import Message

_TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


class FieldError(ValueError):
    """A wrong value; ``field`` is its path within the record."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def get(value: dict[str, Any], name: str, kind: type | tuple[type, ...], at: str = "") -> Any:
    """``value[name]``, or None where it is missing or null.

    Raises:
        FieldError: it is of another type.
    """
    found = value.get(name)
    if found is None:
        return None
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(found, kind) or (isinstance(found, bool) and bool not in kinds):
        wanted = " or ".join(_KINDS[k] for k in kinds)
        raise FieldError(_path(at, name), f"must be {wanted}")
    return found


_KINDS = {str: "text", int: "a whole number", float: "a number", dict: "an object", list: "a list", bool: "a boolean"}


def openai_messages(values: Any, at: str = "messages") -> list[Message]:
    """Messages of a chat completion.

    Raises:
        FieldError: no list of messages with roles.
    """
    if not isinstance(values, list) or not values:
        raise FieldError(at, "must be a list of at least one message")
    return [_openai_message(value, f"{at}[{index}]") for index, value in enumerate(values)]


def openai_answer(value: Any, at: str) -> Message:
    """The message of an answer, whose role may be missing."""
    return _openai_message({"role": "assistant", **value} if isinstance(value, dict) else value, at)


def _openai_message(value: Any, at: str) -> Message:
    if not isinstance(value, dict):
        raise FieldError(at, "must be an object with a role")
    role = get(value, "role", str, at)
    if not role:
        raise FieldError(_path(at, "role"), "is missing")
    message: Message = {"role": role, "content": _content(value.get("content"), _path(at, "content"))}
    reasoning = get(value, "reasoning_content", str, at) or get(value, "reasoning", str, at)
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = get(value, "tool_calls", list, at)
    if calls:
        message["tool_calls"] = [_openai_call(call, f"{at}.tool_calls[{n}]") for n, call in enumerate(calls)]
    call_id = get(value, "tool_call_id", str, at)
    if call_id is not None:
        message["tool_call_id"] = call_id
    return message


def _openai_call(value: Any, at: str) -> Message:
    function = get(value, "function", dict, at) if isinstance(value, dict) else None
    if function is None:
        raise FieldError(_path(at, "function"), "is missing")
    name = get(function, "name", str, _path(at, "function")) or ""
    return tool_call(name, function.get("arguments"), get(value, "id", str, at) or "")


def tool_call(name: str, arguments: Any, call_id: str) -> Message:
    """A tool call; arguments that are JSON text of an object become the object."""
    if isinstance(arguments, str):
        try:
            parsed = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif arguments is None:
        arguments = {}
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


def _content(value: Any, at: str) -> str | list[Message]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [{"type": "text", "text": part_text(part)} for part in value]
    raise FieldError(at, "must be text or a list of parts")


def text_of(value: Any, at: str) -> str:
    """All text of a content, joined."""
    content = _content(value, at)
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    return _digest(part)


def anthropic_messages(role: str, content: Any, at: str) -> Iterator[Message]:
    """A message of Anthropic's API: each tool result a message of its own, then what is left as one.

    Raises:
        FieldError: neither text nor a list of blocks.
    """
    if content is None or isinstance(content, str):
        yield {"role": role, "content": content or ""}
        return
    if not isinstance(content, list):
        raise FieldError(at, "must be text or a list of blocks")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for index, block in enumerate(content):
        where = f"{at}[{index}]"
        if not isinstance(block, dict):
            raise FieldError(where, "must be an object")
        match block.get("type"):
            case "thinking":
                thoughts.append(get(block, "thinking", str, where) or "")
            case "redacted_thinking":
                thoughts.append(_digest(block))
            case "tool_use":
                call_id = get(block, "id", str, where) or ""
                calls.append(tool_call(get(block, "name", str, where) or "", block.get("input"), call_id))
            case "tool_result":
                call_id = get(block, "tool_use_id", str, where) or ""
                text = text_of(block.get("content"), _path(where, "content"))
                yield {"role": "tool", "content": text, "tool_call_id": call_id}
            case _:
                texts.append(part_text(block))
    if not (texts or thoughts or calls):
        return
    message: Message = {"role": role, "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    yield message


def response_item(value: dict[str, Any], at: str) -> Message | None:
    """An item of OpenAI's responses API, as Codex logs them; None for one that is no part of a prompt.

    Raises:
        FieldError: a field of another type.
    """
    kind = get(value, "type", str, at) or "message"
    call_id = get(value, "call_id", str, at) or ""
    if kind == "message":
        role = get(value, "role", str, at)
        if not role:
            raise FieldError(_path(at, "role"), "is missing")
        return {"role": role, "content": text_of(value.get("content"), _path(at, "content"))}
    if kind == "reasoning":
        shown = text_of(value.get("content"), at) or text_of(value.get("summary"), at)
        encrypted = value.get("encrypted_content")
        reasoning = shown or ("" if encrypted is None else _digest(encrypted))
        return {"role": "assistant", "content": "", "reasoning_content": reasoning}
    if kind in ("function_call", "custom_tool_call"):
        arguments = value.get("arguments" if kind == "function_call" else "input")
        call = tool_call(get(value, "name", str, at) or "", arguments, call_id)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind.endswith("_call_output"):
        output = value.get("output")
        text = output if isinstance(output, str) else "" if output is None else orjson.dumps(output).decode()
        return {"role": "tool", "content": text, "tool_call_id": call_id}
    if kind.endswith("_call"):
        return {"role": "assistant", "content": "", "tool_calls": [tool_call(kind, value.get("action"), call_id)]}
    return None


def joined(parts: list[Message]) -> Message:
    """One assistant message of an answer that a log holds in pieces.

    Args:
        parts: at least one assistant message.
    """
    message: Message = {"role": "assistant", "content": "".join(text_of(part["content"], "") for part in parts)}
    reasoning = "\n".join(part["reasoning_content"] for part in parts if part.get("reasoning_content"))
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _digest(value: Any) -> str:
    digest = hashlib.blake2b(orjson.dumps(value), digest_size=8).hexdigest()
    kind = value.get("type") if isinstance(value, dict) else None
    return f"[{kind if isinstance(kind, str) else 'part'} {digest}]"


def _path(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name
