"""Requests of an OpenAI-compatible server, one JSON object a line. Pure.

A line is the body of ``/v1/chat/completions``, ``/v1/completions``, ``/v1/responses``, of Anthropic's ``/v1/messages``
or of SGLang's ``/generate``, or holds it in ``request``, ``body``, ``kwargs``, ``obj`` or ``request_body`` (proxies,
batch files, SGLang's own log); the answer is in ``response``, ``output``, ``out`` or ``response_body``, bare or in
``body`` of that. Field definitions: OpenAI's API reference, "Create chat completion", "Responses" and "Batch";
Anthropic's "Messages"; SGLang 0.5.23, ``srt/utils/request_logger.py``. Streams of chunks in place of an answer are not
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from traces.logs.fields import FieldError, get, posix_seconds
from traces.logs.messages import Message, anthropic_messages, chat_answer, response_items

BODIES = ("request", "body", "kwargs", "obj", "request_body")
PROMPTS = ("messages", "input", "prompt", "text", "input_ids", "prompt_token_ids")
NAMES = ("session_id", "conversation_id", "prompt_cache_key")  # of conversations
_ANSWERS = ("response", "output", "out", "response_body")
_TIMES = ("timestamp", "time", "created_at", "created", "start_time", "startTime", "ts")


class Answer(NamedTuple):
    """What the model wrote: messages, or a text and its tokens.

    Attributes:
        finish: ``finish_reason`` of a chat completion.
    """

    messages: tuple[Message, ...] = ()
    text: str | None = None
    ids: tuple[int, ...] | None = None
    finish: str = ""


class Usage(NamedTuple):
    """Tokens as the server counted them; None where it did not."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None


def body_of(line: dict[str, Any], prompts: Sequence[str] = PROMPTS) -> dict[str, Any] | None:
    """The request's body: the first place with one of the fields ``prompts``."""
    for place in (line, *(line.get(name) for name in BODIES)):
        if isinstance(place, dict) and any(place.get(name) is not None for name in prompts):
            return place
    return None


def name_of(line: dict[str, Any], body: dict[str, Any], names: Sequence[str] = NAMES) -> str | None:
    """The conversation's name, from the line, the body or their ``metadata``."""
    places = (line, body, line.get("metadata"), body.get("metadata"))
    found = (place.get(name) for place in places if isinstance(place, dict) for name in names)
    return next((name for name in found if isinstance(name, str) and name), None)


def sent_of(line: dict[str, Any]) -> float | None:
    """When the request was sent, or logged, in seconds since 1970. Raises FieldError for a time that is none."""
    name = next((name for name in _TIMES if line.get(name) is not None), None)
    return None if name is None else posix_seconds(line[name], name)


def response_of(line: dict[str, Any]) -> dict[str, Any]:
    """The answer's body; empty where the line has none."""
    answer: dict[str, Any] = next((line[name] for name in _ANSWERS if isinstance(line.get(name), dict)), {})
    return answer["body"] if isinstance(answer.get("body"), dict) else answer


def answer_of(response: dict[str, Any]) -> Answer:
    """The first of the answers in a response's body. Raises FieldError; paths begin with ``response``."""
    choices = get(response, "choices", list, "response") or []
    if choices:
        choice, at = choices[0], "response.choices[0]"
        if not isinstance(choice, dict):
            raise FieldError(at, "must be an object")
        finish = get(choice, "finish_reason", str, at) or ""
        message = choice.get("message")
        if message is not None:
            return Answer((chat_answer(message, f"{at}.message"),), finish=finish)
        return Answer(text=get(choice, "text", str, at), finish=finish)
    if isinstance(response.get("content"), list):  # Anthropic
        return Answer(tuple(anthropic_messages("assistant", response["content"], "response.content")))
    if isinstance(response.get("output"), list):  # responses: items one by one
        return Answer(response_items(response["output"], "response.output"))
    ids = response.get("output_ids")
    return Answer(
        text=get(response, "text", str, "response"), ids=None if ids is None else token_ids(ids, "response.output_ids")
    )


def usage_of(response: dict[str, Any]) -> Usage:
    """The server's count in a response's body, or in the line around it. Raises FieldError."""
    meta = response.get("meta_info")
    if isinstance(meta, dict):  # SGLang
        return Usage(*(get(meta, name, int) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")))
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return Usage()
    output = _first(usage, "completion_tokens", "output_tokens")
    if usage.get("cache_read_input_tokens") is not None:  # Anthropic counts the three apart
        new = (get(usage, "input_tokens", int) or 0) + (get(usage, "cache_creation_input_tokens", int) or 0)
        cached = get(usage, "cache_read_input_tokens", int) or 0
        return Usage(new + cached, cached, output)
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = usage.get(name)
        if isinstance(details, dict):
            return Usage(prompt, get(details, "cached_tokens", int), output)
    return Usage(prompt, None, output)


def _first(usage: dict[str, Any], *names: str) -> int | None:
    found: int | None = next((get(usage, name, int) for name in names if usage.get(name) is not None), None)
    return found


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Token ids of one prompt or answer; ``name`` is the field. Raises FieldError."""
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        raise FieldError(name, "must be a list of whole numbers; write a batch of prompts as one request a line")
    return tuple(value)
