"""Claude Code session files (``projects/*/SESSION.jsonl`` and their ``agent-*.jsonl``), event by event. Pure.

A line is an event ``{type, uuid, parentUuid, sessionId, timestamp, message, isSidechain?, agentId?,
isCompactSummary?}``; ``user`` and ``assistant`` events hold messages of Anthropic's API and form trees by
``parentUuid``. An answer's blocks are events of one ``message.id``. The prompt of a call is the path from the root to
its answer's first event, so going back and compaction (a new root with a summary) are seen. Results of parallel tool
calls were sent in one request, but each hangs to its own call, so that only one of them is on the path: the others are
put beside it. Events marked ``isSidechain`` are subagents, one by ``agentId``, else by root. Not in such a file: system
prompt and tools. Answers that the client wrote itself (``<synthetic>``) are no calls; events of unknown types only
link others.

Field names as in TraceLab's ``example_sessions/claude/explanation.md`` and its sample, and in public descriptions of
the format (amplifier's ``session_format_specification.md``, claude-parser's ``JSONL-STRUCTURE.md``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from traces.logs.fields import get, iso_time
from traces.logs.messages import Message, anthropic_messages, joined

MAIN = "main"  # the flow that is no subagent's
_OWN_WORDS = "<synthetic>"
_MARKS = {"sessionId", "leafUuid", "snapshot", "isSidechain"}


def is_event(first: dict[str, Any] | None) -> bool:
    """Whether the first object of a file looks like one of these."""
    return first is not None and isinstance(first.get("type"), str) and bool(_MARKS & first.keys())


class ClaudeCall(NamedTuple):
    """One answer of the model with its prompt.

    Attributes:
        source: of its first event.
        order: of that event in the file.
        flow: ``MAIN``, or a subagent's.
        messages: the prompt; empty where the beginning of the session is not in the file.
        answer: all its events; None where they hold nothing.
        compacted: a summary is part of the prompt.
        sent_s: time of the event before the answer, or of the answer; ended_s of its last event; since 1970.
        stop, model, usage: as the last event says; the type is not checked.
    """

    source: str
    order: int
    flow: str
    messages: tuple[Message, ...]
    answer: Message | None
    compacted: bool
    sent_s: float | None
    ended_s: float | None
    stop: Any
    model: Any
    usage: Any


@dataclass(slots=True)
class _Event:
    source: str
    order: int
    parent: str | None
    messages: tuple[Message, ...] = ()
    at_s: float | None = None
    answer: str = ""  # message.id, for events of an answer
    flow: str = MAIN
    summary: bool = False
    message: dict[str, Any] = field(default_factory=dict)  # an answer's, as it came


class ClaudeLog:
    """One file's events so far.

    Attributes:
        session: its id, once an event has told it; else empty.
    """

    def __init__(self) -> None:
        self.session = ""
        self._events: dict[str, _Event] = {}
        self._results: dict[str, list[_Event]] = {}  # by answer: events with results of its tool calls
        self._open: dict[str, list[_Event]] = {}  # by flow: the answer whose events may still come

    def add(self, raw: dict[str, Any], source: str) -> ClaudeCall | None:
        """Take a line; returns the call of its flow that is complete by it, if any.

        Raises:
            FieldError: a wrong field; the line is left out.
        """
        self.session = self.session or get(raw, "sessionId", str) or ""
        uuid = get(raw, "uuid", str)
        if uuid is None:
            return None
        event = self._event(raw, source)
        self._events[uuid] = event
        called = self._called(event)
        if called:
            self._results.setdefault(called, []).append(event)
        if not event.answer or event.message.get("model") == _OWN_WORDS:
            return None
        before = self._open.get(event.flow, [])
        if before and before[0].answer == event.answer:
            before.append(event)
            return None
        self._open[event.flow] = [event]
        return self._call(before) if before else None

    def end(self) -> list[ClaudeCall]:
        """The calls whose events came last, one a flow at most."""
        pieces, self._open = list(self._open.values()), {}
        return [self._call(events) for events in pieces]

    def _event(self, raw: dict[str, Any], source: str) -> _Event:
        parent = get(raw, "parentUuid", str)
        kind = raw.get("type")
        message = get(raw, "message", dict)
        known = self._events.get(parent or "")
        order = len(self._events)
        if kind not in ("user", "assistant") or message is None:
            return _Event(source, order, parent, at_s=None if known is None else known.at_s)
        flow = MAIN
        if raw.get("isSidechain") is True:
            root = known.flow if known is not None else f"sidechain {source.rpartition(':')[2]}"
            flow = get(raw, "agentId", str) or root
        messages = tuple(anthropic_messages(kind, message.get("content"), "message.content"))
        if kind == "user":
            summary = raw.get("isCompactSummary") is True
            return _Event(source, order, parent, messages, iso_time(raw), flow=flow, summary=summary)
        answer = get(message, "id", str, "message") or source
        return _Event(source, order, parent, messages, iso_time(raw), answer, flow, message=message)

    def _called(self, event: _Event) -> str:
        """The answer whose tool calls an event has results of; empty for none."""
        asked = self._events.get(event.parent or "")
        return asked.answer if asked is not None and any(m.role == "tool" for m in event.messages) else ""

    def _call(self, events: list[_Event]) -> ClaudeCall:
        first, last = events[0], events[-1]
        path, compacted = self._path(first)
        times = [event.at_s for event in events if event.at_s is not None]
        parent = self._events.get(first.parent or "")
        before = [time for time in (None if parent is None else parent.at_s, first.at_s) if time is not None]
        said = [message for event in events for message in event.messages]
        return ClaudeCall(
            source=first.source,
            order=first.order,
            flow=first.flow,
            messages=path,
            answer=joined(said) if said else None,
            compacted=compacted,
            sent_s=min(before, default=max(times, default=None)),
            ended_s=max(times, default=None),
            stop=last.message.get("stop_reason"),
            model=last.message.get("model"),
            usage=last.message.get("usage"),
        )

    def _path(self, asked: _Event) -> tuple[tuple[Message, ...], bool]:
        """Messages from the root to the event before ``asked``, and whether a summary is among them."""
        path: list[_Event] = []
        seen: set[int] = set()
        event = self._events.get(asked.parent or "")
        while event is not None and event.order not in seen:
            seen.add(event.order)
            path.append(event)
            event = self._events.get(event.parent or "")
        made: list[Message] = []
        before = ""
        for event in reversed(path):
            told = [*self._beside(event, asked, seen), event]
            for message in (message for one in sorted(told, key=lambda one: one.order) for message in one.messages):
                if event.answer and event.answer == before:
                    made[-1] = joined([made[-1], message])
                else:
                    made.append(message)
            if event.messages:
                before = event.answer
        return tuple(made), any(event.summary for event in path)

    def _beside(self, event: _Event, asked: _Event, seen: set[int]) -> list[_Event]:
        """Other results of the same answer's calls, from before ``asked`` and not on the path; each is given once."""
        called = self._called(event)
        others = [o for o in self._results.get(called, []) if o.order not in seen and o.order < asked.order]
        seen.update(other.order for other in others)
        return others
