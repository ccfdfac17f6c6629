"""Claude Code session files (``projects/*/SESSION.jsonl`` and their ``subagents/agent-*.jsonl``).

A line is an event; ``user`` and ``assistant`` events form trees by ``uuid`` and ``parentUuid``. An answer's blocks are
lines of one ``message.id``. The prompt of a call is the path to its first line, so going back and compaction
(``isCompactSummary``, a new root) are seen. Not in such a file: system prompt and tools, so a change of those shows
only as a miss in the server's own count (``usage``). Field names as found in public descriptions of the format
(amplifier's ``session_format_specification.md``, claude-parser's ``JSONL-STRUCTURE.md``); events of unknown types are
passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from eval.diagnose.chat import Call, Message, Request
from eval.diagnose.logs.base import Line, LogError, LogFormat, Skip, count, field, seconds
from eval.diagnose.logs.messages import anthropic_message, chat_messages

_EVENTS = ("user", "assistant", "system", "summary", "progress", "attachment", "file-history-snapshot")


def _fits(value: dict[str, Any]) -> bool:
    return value.get("type") in _EVENTS and ("sessionId" in value or "leafUuid" in value or "snapshot" in value)


class _Event(NamedTuple):
    parent: str | None
    messages: tuple[Message, ...]
    answer: str | None  # message.id of an assistant's line
    summary: bool


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    session = _Session(skip)
    for where, value in lines:
        try:
            ended = session.add(where, value)
        except LogError as error:
            skip(f"{where}: {error}")
            continue
        if ended is not None:
            yield ended
    if (last := session.end()) is not None:
        yield last


FORMAT = LogFormat("claude-code", _fits, _read)


class _Session:
    """Events so far, and the call whose lines are still coming."""

    def __init__(self, skip: Skip) -> None:
        self._skip = skip
        self._events: dict[str, _Event] = {}
        self._results: dict[str, list[str]] = {}  # by answer: events with results of its tool calls
        self._open: tuple[str, dict[str, Any], list[dict[str, Any]]] | None = None

    def add(self, where: str, value: dict[str, Any]) -> Call | None:
        """Take a line; returns the call that it ends, if any. Raises LogError for a faulty one."""
        kind = value.get("type")
        uuid = field(value, "uuid", str)
        if uuid is None:
            return None
        parent = field(value, "parentUuid", str)
        message = field(value, "message", dict)
        if kind not in ("user", "assistant") or message is None:
            self._events[uuid] = _Event(parent, (), None, False)
            return None
        if kind == "user":
            content = message.get("content")
            made = (
                tuple(anthropic_message("user", content))
                if isinstance(content, list)
                else chat_messages([{**message, "role": "user"}])
            )
            self._events[uuid] = _Event(parent, made, None, value.get("isCompactSummary") is True)
            called = self._called(self._events[uuid])
            if called is not None:
                self._results.setdefault(called, []).append(uuid)
            return None
        answer = field(message, "id", str) or uuid
        blocks = field(message, "content", list) or []
        self._events[uuid] = _Event(parent, tuple(anthropic_message("assistant", blocks)), answer, False)
        if self._open is not None and (field(self._open[1]["message"], "id", str) or self._open[1]["uuid"]) == answer:
            self._open[2].append(value)
            return None
        ended = self.end()
        self._open = (where, value, [value])
        return ended

    def end(self) -> Call | None:
        """The call whose lines came last; a faulty one is passed over."""
        if self._open is None:
            return None
        where, first, all_lines = self._open
        self._open = None
        try:
            return self._call(where, first, all_lines)
        except LogError as error:
            self._skip(f"{where}: {error}")
            return None

    def _call(self, where: str, first: dict[str, Any], all_lines: list[dict[str, Any]]) -> Call | None:
        if first["message"].get("model") == "<synthetic>":  # written by the client itself: an error, an abort
            return None
        messages, compacted, root = self._path(field(first, "parentUuid", str))
        blocks = [b for line in all_lines for b in field(line["message"], "content", list) or []]
        answer = tuple(anthropic_message("assistant", blocks))
        usage = field(all_lines[-1]["message"], "usage", dict) or {}
        cached = count(usage, "cache_read_input_tokens")
        prompt = count(usage, "input_tokens") + count(usage, "cache_creation_input_tokens") + cached
        flow = first.get("agentId") or (root if first.get("isSidechain") is True else "")
        return Call(
            where=where,
            request=Request(messages, compacted=compacted),
            session=f"{first.get('sessionId', '')}/{flow}",
            answer=answer,
            prompt_tokens=prompt if usage else None,
            cached_tokens=cached if usage else None,
            at_s=seconds(first.get("timestamp")),
            model=str(first["message"].get("model") or ""),
        )

    def _path(self, uuid: str | None) -> tuple[tuple[Message, ...], bool, str]:
        """Messages from the root to ``uuid``; whether a summary is among them; and the root."""
        events: list[_Event] = []
        seen: set[str] = set()
        root = ""
        while uuid is not None and uuid not in seen:
            root = uuid
            seen.add(uuid)
            event = self._events.get(uuid)
            if event is None:
                break
            events.append(event)
            uuid = event.parent
        made: list[Message] = []
        before: str | None = None
        for event in reversed(events):
            for message in self._sent_with(event, seen):
                if event.answer is not None and event.answer == before and made[-1].role == "assistant":
                    made[-1] = _joined(made[-1], message)
                else:
                    made.append(message)
            if event.messages:
                before = event.answer
        return tuple(made), any(event.summary for event in events), root

    def _called(self, event: _Event) -> str | None:
        """The answer whose tool calls an event has results of."""
        asked = self._events.get(event.parent or "")
        if asked is None or not any(message.role == "tool" for message in event.messages):
            return None
        return asked.answer

    def _sent_with(self, event: _Event, seen: set[str]) -> list[Message]:
        """Messages of an event, and results of parallel calls: sent in one request, but each hangs to its own call,
        so that only one of them is on the path."""
        answer = self._called(event)
        if answer is None:
            return list(event.messages)
        together = [uuid for uuid in self._results[answer] if uuid not in seen or self._events[uuid] is event]
        seen.update(together)
        return [message for uuid in together for message in self._events[uuid].messages]


def _joined(one: Message, other: Message) -> Message:
    """Two lines of one answer."""
    thoughts = [m.reasoning for m in (one, other) if m.reasoning is not None]
    return Message(
        one.role, one.content + other.content, "\n".join(thoughts) if thoughts else None, one.calls + other.calls
    )
