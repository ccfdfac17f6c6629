"""Requests of an OpenAI-compatible server, one JSON object a line.

Read are bodies of ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, of Anthropic's ``/v1/messages`` and
of SGLang's ``/generate``, bare or within ``request``, ``body``, ``kwargs`` or ``obj``; the answer from ``response``,
``output`` or ``out``. That covers proxies' and batch files' JSONL, and SGLang's own ``--log-requests
--log-requests-level 3 --log-requests-format json`` (0.5.23, ``srt/utils/request_logger.py``), whose
``request.finished`` lines hold token ids.

A conversation's name is taken from ``session_id``, ``conversation_id``, ``prompt_cache_key`` or ``user`` of the line,
the body or its ``metadata``. Streams of chunks in place of a response are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from eval.diagnose.chat import Call, Message, Request
from eval.diagnose.logs.base import Line, LogError, LogFormat, Skip, field, seconds
from eval.diagnose.logs.messages import (
    anthropic_message,
    chat_messages,
    response_items,
    system_message,
    tool_texts,
)

_BODIES = ("request", "body", "kwargs", "obj", "request_body")
_ANSWERS = ("response", "output", "out", "response_body")
_PROMPTS = ("messages", "input", "prompt", "text", "input_ids", "prompt_token_ids")
_SESSIONS = ("session_id", "conversation_id", "conversation", "prompt_cache_key", "user", "user_id")
_TIMES = ("timestamp", "time", "created_at", "created", "start_time", "startTime", "ts")


def _fits(value: dict[str, Any]) -> bool:
    return _body(value) is not None or "event" in value


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    for where, value in lines:
        # SGLang logs a request twice and more; only the last has the answer.
        if str(value.get("event", "")).startswith("request.received"):
            continue
        try:
            body = _body(value)
            if body is None:
                raise LogError(f"no request: none of {', '.join(_PROMPTS)} is in it, nor in {', '.join(_BODIES)}")
            yield _call(where, value, body)
        except LogError as error:
            skip(f"{where}: {error}")


FORMAT = LogFormat("requests", _fits, _read)


def _body(value: dict[str, Any]) -> dict[str, Any] | None:
    for candidate in (value, *(value.get(name) for name in _BODIES)):
        if isinstance(candidate, dict) and any(candidate.get(name) is not None for name in _PROMPTS):
            return candidate
    return None


def _call(where: str, line: dict[str, Any], body: dict[str, Any]) -> Call:
    answer: dict[str, Any] = next((line[k] for k in _ANSWERS if isinstance(line.get(k), dict)), {})
    answer = answer["body"] if isinstance(answer.get("body"), dict) else answer
    message, text, ids = _answer(answer)
    prompt, cached = _usage(answer if "usage" in answer or "meta_info" in answer else line)
    at = next((s for k in _TIMES if (s := seconds(line.get(k))) is not None), None)
    return Call(
        where=where,
        request=_request(body),
        session=_session(line, body),
        answer=message,
        answer_text=text,
        answer_ids=ids,
        prompt_tokens=prompt,
        cached_tokens=cached,
        at_s=at,
        model=body["model"] if isinstance(body.get("model"), str) else "",
    )


def _request(body: dict[str, Any]) -> Request:
    if body.get("messages") is not None:
        messages = (*system_message(body.get("system")), *chat_messages(body["messages"]))
        return Request(messages, tool_texts(body))
    if body.get("input") is not None:
        messages = (*system_message(body.get("instructions")), *response_items(body["input"]))
        return Request(messages, tool_texts(body))
    ids = next((body[k] for k in ("input_ids", "prompt_token_ids") if body.get(k) is not None), None)
    text = next((body[k] for k in ("text", "prompt") if body.get(k) is not None), None)
    if isinstance(text, list):
        ids, text = text, None
    if text is not None and not isinstance(text, str):
        raise LogError(f"the prompt is {type(text).__name__}, neither text nor token ids")
    return Request(text=text, ids=None if ids is None else _ids(ids))


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise LogError("token ids are no list of whole numbers (a batch of prompts is one request too many a line)")
    return tuple(value)


def _answer(answer: dict[str, Any]) -> tuple[tuple[Message, ...], str | None, tuple[int, ...] | None]:
    """What the model wrote: messages, or a text and tokens."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        choice = choices[0]
        if isinstance(choice.get("message"), dict):
            found = chat_messages([{"role": "assistant", **choice["message"]}])
            return found, None, None
        return (), field(choice, "text", str), None
    if isinstance(answer.get("content"), list):  # Anthropic
        found = tuple(anthropic_message("assistant", answer["content"]))
        return found, None, None
    if isinstance(answer.get("output"), list):  # responses: items one by one
        return response_items(answer["output"]), None, None
    ids = answer.get("output_ids")
    return (), field(answer, "text", str), None if ids is None else _ids(ids)


def _usage(answer: dict[str, Any]) -> tuple[int | None, int | None]:
    """Prompt and cached tokens as the server counted them; None where it did not."""
    meta = answer.get("meta_info")
    if isinstance(meta, dict):
        return field(meta, "prompt_tokens", int), field(meta, "cached_tokens", int)
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None, None
    if usage.get("cache_read_input_tokens") is not None:  # Anthropic counts the three apart
        parts = [field(usage, k, int) or 0 for k in ("input_tokens", "cache_creation_input_tokens")]
        cached = field(usage, "cache_read_input_tokens", int) or 0
        return sum(parts) + cached, cached
    prompt = next((field(usage, k, int) for k in ("prompt_tokens", "input_tokens") if usage.get(k) is not None), None)
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            return prompt, field(details, "cached_tokens", int)
    return prompt, None


def _session(line: dict[str, Any], body: dict[str, Any]) -> str | None:
    for place in (line, body, line.get("metadata"), body.get("metadata")):
        if isinstance(place, dict):
            for name in _SESSIONS:
                if isinstance(place.get(name), str) and place[name]:
                    return str(place[name])
    return None
