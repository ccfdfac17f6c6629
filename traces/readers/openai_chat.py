"""Chat logs of an OpenAI-compatible server: one request with its complete messages a line.

A ``.jsonl`` file (also ``.xz``, ``.gz``, ``.bz2``). Where in a line the request, the answer and a name are,
``traces.logs.requests`` says. Read are ``messages``, ``tools``, ``model``; from the answer ``choices[0].message``,
``finish_reason`` and ``usage.completion_tokens``; a time (seconds, milliseconds or ISO 8601; of when the request was
sent), and a duration from ``duration_s`` or ``latency_s``.

How it is read: a request without a name belongs to the conversation of the longest earlier request whose messages
are the beginning of its own, else it starts one, named by its line. Messages become tokens by the served model's
chat template and tokenizer, so a tokenizer is needed, and all lengths are the served model's. Without times
requests are one second apart. The file is read twice, since conversations are mixed.

Not supported: answers of several choices (the first counts), streams of chunks in place of an answer,
``/v1/completions``; images stand as a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson

from traces.logs.fields import FieldError, get
from traces.logs.messages import chat_messages, openai_dicts
from traces.logs.requests import answer_of, body_of, name_of, response_of, sent_of, usage_of
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, TraceError
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, LoggedCall, logged_turns
from traces.readers.files import LINE_FILES, Document, Group, first_object, grouped_lines, parse_object
from traces.readers.ids import TokenBlocks
from traces.text import ChatTokenizer, Message

_DURATIONS = ("duration_s", "latency_s")
_STOPS = {"tool_calls": StopReason.TOOL_USE, "stop": StopReason.END_TURN}


def _matches(path: str) -> bool:
    first = first_object(path) if path.endswith(LINE_FILES) else None
    # AIPerf's session files have messages too, and say how the replies are to be treated.
    return first is not None and "output_length" not in first and isinstance(_body(first).get("messages"), list)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    tokenizer = reading.text_tokenizer(path)
    return reading.parsed(grouped_lines(path, _conversations), partial(_session, tokenizer=tokenizer))


def _body(line: dict[str, Any]) -> dict[str, Any]:
    return body_of(line, ("messages",)) or line


def _conversations(lines: Iterator[Document]) -> list[str | None]:
    """The conversation of each line: by name, or by the messages that it repeats."""
    keys: list[str | None] = []
    seen: dict[bytes, str] = {}  # all messages of a request -> its conversation
    for line in lines:
        try:
            raw = parse_object(line)
        except TraceError:
            keys.append(None)
            continue
        body = _body(raw)
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            keys.append(None)
            continue
        key = name_of(raw, body)
        digest = hashlib.blake2b(digest_size=16)
        for message in messages:
            digest.update(orjson.dumps(message) + b"\n")
            if key is None or digest.digest() in seen:
                key = name_of(raw, body) or seen.get(digest.digest(), key)
        key = key or line.source.rpartition(":")[2]
        seen[digest.digest()] = key
        keys.append(key)
    return keys


def _session(group: Group, tokenizer: ChatTokenizer) -> Session:
    calls = []
    for index, line in enumerate(group.lines):
        raw = parse_object(line)
        try:
            calls.append(_call(raw, line.source, index))
        except FieldError as error:
            raise TraceError(
                str(error), file=line.source, session=group.key or None, turn=index, field=error.field
            ) from error
    blocks = TokenBlocks(BLOCK_SIZE)
    turns = logged_turns(calls, tokenizer, blocks, origin_s=calls[0].sent_s, session=group.key)
    return Session(group.key, BLOCK_SIZE, BlockScope.SESSION, Flow(MAIN_FLOW, turns), source=group.lines[0].source)


def _call(line: dict[str, Any], source: str, index: int) -> LoggedCall:
    body = _body(line)
    get(line, "response", dict)
    response = response_of(line)
    answer = answer_of(response)
    usage = usage_of(response)
    sent = sent_of(line)
    duration = next((d for name in _DURATIONS if (d := get(line, name, (int, float))) is not None), None)
    if duration is not None and not 0 <= duration < 1e9:
        raise FieldError("duration_s", "must be seconds of at least 0")
    start = float(index) if sent is None else sent
    return LoggedCall(
        source=source,
        messages=openai_dicts(chat_messages(body.get("messages"))),
        tools=_tools(body),
        answer=answer.messages[0].as_openai() if answer.messages else None,
        output_tokens=min(1 << 24, max(0, usage.output or 0)),
        sent_s=start,
        ended_s=None if duration is None else start + duration,
        stop=_STOPS.get(answer.finish, StopReason.UNKNOWN),
        model=get(body, "model", str) or "",
    )


def _tools(body: dict[str, Any]) -> list[Message]:
    tools = get(body, "tools", list) or []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise FieldError(f"tools[{index}]", "must be an object")
    return tools


register(TraceFormat("openai-chat", _matches, _read))
