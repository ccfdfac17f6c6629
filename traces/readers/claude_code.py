"""Claude Code sessions: the client's own log, text and all (``projects/*/SESSION.jsonl`` and ``agent-*.jsonl``).

A ``.jsonl`` file is one session, or a directory of them (searched recursively). A line is an event ``{type, uuid,
parentUuid, sessionId, timestamp, message, isSidechain?, agentId?, isCompactSummary?}``; ``user`` and ``assistant``
events hold messages of Anthropic's API and form a tree by ``parentUuid``. An answer's blocks are events of one
``message.id``. Field names as in TraceLab's ``example_sessions/claude/explanation.md`` and its sample.

How it is read: each answer is a request, sent at the time of its parent event; its prompt is the path from the root
to it, so going back in the conversation and compaction (a new root) are kept. Events marked ``isSidechain`` are
subagents, one by ``agentId`` (else by root); a file of sidechain events alone is a session of its own. The log has
neither system prompt nor tools, so prompts are shorter than those that were sent, and what sessions share of them
is lost (noted). Messages become tokens by the served model's template and tokenizer: one is needed. Stop reasons
and models are those of the log; answers that the client made up itself (``<synthetic>``) are no requests.

Not supported: thinking that the log has only encrypted is missing; images stand as a digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, TraceError
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, LoggedCall, logged_turns
from traces.readers.files import LINE_FILES, Document, files_of, first_object, line_documents, parse_object
from traces.readers.ids import TokenBlocks
from traces.readers.messages import FieldError, anthropic_messages, get, joined
from traces.readers.tracelab import seconds
from traces.spawn import attach
from traces.text import ChatTokenizer, Message

_STOPS = {"tool_use": StopReason.TOOL_USE, "end_turn": StopReason.END_TURN}
_OWN_WORDS = "<synthetic>"


def _matches(path: str) -> bool:
    if Path(path).is_dir():
        first = next(iter(sorted(Path(path).rglob("*.jsonl"))), None)
        return first is not None and _is_event(first_object(str(first)))
    return path.endswith(LINE_FILES) and _is_event(first_object(path))


def _is_event(first: dict[str, Any] | None) -> bool:
    marks = {"sessionId", "leafUuid", "snapshot", "isSidechain"}
    return first is not None and isinstance(first.get("type"), str) and bool(marks & first.keys())


def _read(path: str, reading: Reading) -> Iterator[Session]:
    parse = partial(_session, tokenizer=reading.text_tokenizer(path), notes=reading.stats.notes)
    return reading.parsed(iter(files_of(Path(path), LINE_FILES)), parse)


@dataclass(slots=True)
class _Event:
    """A user or assistant event, or one that only links others."""

    source: str
    order: int  # in the file
    parent: str | None
    messages: list[Message]
    at_s: float | None = None
    answer: str = ""  # message.id, for events of an answer
    flow: str = MAIN_FLOW
    message: dict[str, Any] = field(default_factory=dict)


def _session(path: Path, tokenizer: ChatTokenizer, notes: list[str]) -> Session:
    events: dict[str, _Event] = {}
    name = ""
    for line in line_documents(path):
        raw = parse_object(line)
        try:
            name = name or get(raw, "sessionId", str) or ""
            uuid = get(raw, "uuid", str)
            if uuid is not None:
                events[uuid] = _event(raw, line, events, len(events))
        except FieldError as error:
            raise TraceError(str(error), file=line.source, session=name or None, field=error.field) from error
    name = name or path.name.partition(".")[0]
    calls = _calls(events)
    if not calls:
        raise TraceError("no answer of the model in it; is it a session?", file=str(path), session=name)
    if MAIN_FLOW not in calls:  # a subagent's own file
        calls = {MAIN_FLOW: calls[min(calls, key=lambda flow: calls[flow][0].sent_s)]}
        name = f"{name}/{path.name.partition('.')[0]}"
    origin = min(call.sent_s for flow in calls.values() for call in flow)
    blocks = TokenBlocks(BLOCK_SIZE)
    turns = {
        flow: logged_turns(found, tokenizer, blocks, origin_s=origin, session=name) for flow, found in calls.items()
    }
    main = Flow(MAIN_FLOW, turns.pop(MAIN_FLOW))
    subagents = []
    for flow, own in turns.items():
        end = own[-1].start_s + (own[-1].api_s or 0.0)
        spawn, join = attach(own[0].start_s, end, main.turns)
        subagents.append(
            Flow(
                flow, own, spawn_after=spawn, join_before=join, start_s=own[0].start_s, duration_s=end - own[0].start_s
            )
        )
    notes.append(f"{path}, session {name}: system prompt and tools are not in the log; prompts are shorter than sent")
    return Session(name, BLOCK_SIZE, BlockScope.SESSION, main, tuple(subagents), source=str(path))


def _event(raw: dict[str, Any], line: Document, events: dict[str, _Event], order: int) -> _Event:
    parent = get(raw, "parentUuid", str)
    kind = raw.get("type")
    message = get(raw, "message", dict)
    if kind not in ("user", "assistant") or message is None:
        known = events.get(parent or "")
        return _Event(line.source, order, parent, [], None if known is None else known.at_s)
    at = get(raw, "timestamp", str)
    try:
        at_s = None if at is None else seconds(at)
    except (ValueError, OverflowError) as error:
        raise FieldError("timestamp", "must be an ISO-8601 time") from error
    if at_s is None:
        raise FieldError("timestamp", "is missing")
    flow = MAIN_FLOW
    if raw.get("isSidechain") is True:
        known = events.get(parent or "")
        root = known.flow if known is not None else f"sidechain {line.source.rpartition(':')[2]}"
        flow = get(raw, "agentId", str) or root
    messages = list(anthropic_messages(kind, message.get("content"), "message.content"))
    answer = (get(message, "id", str, "message") or line.source) if kind == "assistant" else ""
    return _Event(line.source, order, parent, messages, at_s, answer, flow, message)


def _calls(events: dict[str, _Event]) -> dict[str, list[LoggedCall]]:
    """Requests of each flow by time; flows in order of their first event."""
    answers: dict[tuple[str, str], list[_Event]] = {}
    results = _tool_results(events)
    for event in events.values():
        if event.answer and event.message.get("model") != _OWN_WORDS:
            answers.setdefault((event.flow, event.answer), []).append(event)
    calls: dict[str, list[LoggedCall]] = {}
    for (flow, _), parts in answers.items():
        first, last = parts[0], parts[-1]
        prompt = _path(events, results, first)
        if not prompt:
            continue  # the beginning of the session is not in this file
        parent = events[first.parent or ""]
        ended = max(part.at_s or 0.0 for part in parts)
        sent = ended if parent.at_s is None else min(parent.at_s, first.at_s or ended)
        said = [message for part in parts for message in part.messages]
        stop = last.message.get("stop_reason")
        model = last.message.get("model")
        calls.setdefault(flow, []).append(
            LoggedCall(
                source=first.source,
                messages=prompt,
                answer=joined(said) if said else None,
                sent_s=sent,
                ended_s=ended,
                stop=_STOPS.get(stop, StopReason.UNKNOWN) if isinstance(stop, str) else StopReason.UNKNOWN,
                model=model if isinstance(model, str) else "",
            )
        )
    for found in calls.values():
        found.sort(key=lambda call: call.sent_s)
    return calls


def _tool_results(events: dict[str, _Event]) -> dict[str, list[_Event]]:
    """The events with results of an answer's tool calls, by the answer: those of parallel calls are no chain."""
    results: dict[str, list[_Event]] = {}
    for event in events.values():
        called = events.get(event.parent or "")
        if called is not None and called.answer and any(message["role"] == "tool" for message in event.messages):
            results.setdefault(called.answer, []).append(event)
    return results


def _path(events: dict[str, _Event], results: dict[str, list[_Event]], asked: _Event) -> list[Message]:
    """Messages from the root to the event before ``asked``; pieces of one answer are one message."""
    path: list[_Event] = []
    seen: set[int] = set()
    event = events.get(asked.parent or "")
    while event is not None and event.order not in seen:
        seen.add(event.order)
        path.append(event)
        event = events.get(event.parent or "")
    messages: list[Message] = []
    before = ""
    for event in reversed(path):
        # Results of an answer's calls were sent in one request, but each hangs to its own call.
        told = [*_siblings(events, results, event, asked, seen), event]
        for message in (message for one in sorted(told, key=lambda one: one.order) for message in one.messages):
            if event.answer and event.answer == before:
                messages[-1] = joined([messages[-1], message])
            else:
                messages.append(message)
        if event.messages:
            before = event.answer
    return messages


def _siblings(
    events: dict[str, _Event], results: dict[str, list[_Event]], event: _Event, asked: _Event, seen: set[int]
) -> list[_Event]:
    """Other results of the same answer's calls, from before ``asked`` and not on the path; each is given out once."""
    called = events.get(event.parent or "")
    if called is None or not any(message["role"] == "tool" for message in event.messages):
        return []
    found = results.get(called.answer, [])
    others = [other for other in found if other.order not in seen and other.order < asked.order]
    seen.update(other.order for other in others)
    return others


register(TraceFormat("claude-code", _matches, _read))
