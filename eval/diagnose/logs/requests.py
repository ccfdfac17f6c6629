"""Requests of an OpenAI-compatible server, one JSON object a line, as ``traces.logs.requests`` reads them.

SGLang's own ``--log-requests --log-requests-level 3 --log-requests-format json`` is one of them; its
``request.finished`` lines hold token ids. A conversation's name is also taken from ``conversation`` and ``user``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from eval.diagnose.chat import Call, Message, Request
from eval.diagnose.logs.base import Line, LogFormat, Skip, faulty
from traces.logs.fields import FieldError, get
from traces.logs.messages import chat_messages, response_items, text_of
from traces.logs.requests import (
    BODIES,
    NAMES,
    PROMPTS,
    answer_of,
    body_of,
    name_of,
    response_of,
    sent_of,
    token_ids,
    usage_of,
)

_NAMES = (*NAMES, "conversation", "user", "user_id")


def _fits(value: dict[str, Any]) -> bool:
    return body_of(value) is not None or "event" in value


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    for where, value in lines:
        # SGLang logs a request twice and more; only the last has the answer.
        if str(value.get("event", "")).startswith("request.received"):
            continue
        body = body_of(value)
        if body is None:
            skip(f"{where}: no request: none of {', '.join(PROMPTS)} is in it, nor in {', '.join(BODIES)}")
            continue
        try:
            yield _call(where, value, body)
        except FieldError as error:
            skip(faulty(where, error))


FORMAT = LogFormat("requests", _fits, _read)


def _call(where: str, line: dict[str, Any], body: dict[str, Any]) -> Call:
    response = response_of(line)
    answer = answer_of(response)
    usage = usage_of(response if "usage" in response or "meta_info" in response else line)
    return Call(
        where=where,
        request=_request(body),
        session=name_of(line, body, _NAMES),
        answer=answer.messages,
        answer_text=answer.text,
        answer_ids=answer.ids,
        prompt_tokens=usage.prompt,
        cached_tokens=usage.cached,
        at_s=_time(line),
        model=body["model"] if isinstance(body.get("model"), str) else "",
    )


def _time(line: dict[str, Any]) -> float | None:
    """A time that is none costs a remark on pauses, and not the call."""
    try:
        return sent_of(line)
    except FieldError:
        return None


def _request(body: dict[str, Any]) -> Request:
    if body.get("messages") is not None:
        return Request((*_system(body, "system"), *chat_messages(body["messages"])), _tools(body))
    if body.get("input") is not None:
        return Request((*_system(body, "instructions"), *response_items(body["input"], "input")), _tools(body))
    name = next(name for name in ("input_ids", "prompt_token_ids", "text", "prompt") if body.get(name) is not None)
    found = body[name]
    text = next((body[k] for k in ("text", "prompt") if isinstance(body.get(k), str)), None)
    if isinstance(found, str):
        return Request(text=found)
    if not isinstance(found, list):
        raise FieldError(name, "must be text or a list of token ids")
    return Request(text=text, ids=token_ids(found, name))


def _system(body: dict[str, Any], name: str) -> tuple[Message, ...]:
    """``system`` or ``instructions``: none, a text, or blocks."""
    text = text_of(body.get(name), name)
    return (Message("system", text),) if text else ()


def _tools(body: dict[str, Any]) -> tuple[str, ...]:
    """``tools`` as JSON texts with the keys in the order sent."""
    return tuple(orjson.dumps(tool).decode() for tool in get(body, "tools", list) or ())
