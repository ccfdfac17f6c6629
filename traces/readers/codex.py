"""Codex sessions: the client's own log (``sessions/YYYY/MM/DD/rollout-*.jsonl``).

A ``.jsonl`` file is one session, or a directory of them (searched recursively). A line is ``{timestamp, type,
payload}`` with type ``session_meta`` (``id``, ``base_instructions``), ``turn_context`` (``model``),
``response_item`` (items of OpenAI's responses API), ``event_msg`` (``token_count`` closes a request) or
``compacted`` (``message`` or ``replacement_history`` take the place of the history). Field names as in TraceLab's
``example_sessions/codex/explanation.md`` and its sample.

How it is read: a request is a run of items that the model wrote (reasoning, messages, tool calls), up to a
``token_count`` or an item it did not write; its prompt is the instructions and all items before, sent at the time
of the last of them. A request that ended with a tool call stopped for it. Messages become tokens by the served
model's template and tokenizer: one is needed. Tools are not in the log, so prompts are shorter than those that were
sent (noted).

Not supported: reasoning that is encrypted stands as a digest; subagents are sessions of their own.
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
from traces.readers.files import LINE_FILES, files_of, first_object, line_documents, parse_object
from traces.readers.ids import TokenBlocks
from traces.readers.messages import FieldError, get, joined, response_item, text_of
from traces.readers.tracelab import seconds
from traces.text import ChatTokenizer, Message

_TYPES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")


def _matches(path: str) -> bool:
    if Path(path).is_dir():
        first = next(iter(sorted(Path(path).rglob("*.jsonl"))), None)
        return first is not None and _is_record(first_object(str(first)))
    return path.endswith(LINE_FILES) and _is_record(first_object(path))


def _is_record(first: dict[str, Any] | None) -> bool:
    return first is not None and first.get("type") in _TYPES and isinstance(first.get("payload"), dict)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    parse = partial(_session, tokenizer=reading.text_tokenizer(path), notes=reading.stats.notes)
    return reading.parsed(iter(files_of(Path(path), LINE_FILES)), parse)


def _session(path: Path, tokenizer: ChatTokenizer, notes: list[str]) -> Session:
    log = _Log()
    for line in line_documents(path):
        raw = parse_object(line)
        try:
            log.add(raw, line.source)
        except FieldError as error:
            raise TraceError(str(error), file=line.source, session=log.name or None, field=error.field) from error
    log.close()
    name = log.name or path.name.partition(".")[0]
    if not log.calls:
        raise TraceError("no answer of the model in it; is it a session?", file=str(path), session=name)
    notes.append(f"{path}, session {name}: tools are not in the log; prompts are shorter than sent")
    blocks = TokenBlocks(BLOCK_SIZE)
    turns = logged_turns(log.calls, tokenizer, blocks, origin_s=log.calls[0].sent_s, session=name)
    return Session(name, BLOCK_SIZE, BlockScope.SESSION, Flow(MAIN_FLOW, turns), source=str(path))


@dataclass(slots=True)
class _Log:
    """What was read of a session: its requests, the history, and the answer that may still go on."""

    name: str = ""
    calls: list[LoggedCall] = field(default_factory=list)
    _model: str = ""
    _system: list[Message] = field(default_factory=list)
    _history: list[Message] = field(default_factory=list)
    _prompt: list[Message] = field(default_factory=list)  # of the open answer
    _answer: list[Message] = field(default_factory=list)
    _source: str = ""
    _sent_s: float = 0.0  # of the open answer
    _last_s: float | None = None  # of the last item

    def add(self, raw: dict[str, Any], source: str) -> None:
        """Take a record.

        Raises:
            FieldError: a wrong or missing field.
        """
        payload = get(raw, "payload", dict)
        if payload is None:
            raise FieldError("payload", "is missing; is it a record of a Codex session?")
        match raw.get("type"):
            case "session_meta":
                self.name = get(payload, "id", str, "payload") or self.name
                instructions = payload.get("base_instructions") or payload.get("instructions")
                if isinstance(instructions, dict):
                    instructions = instructions.get("text")
                text = text_of(instructions, "payload.base_instructions")
                self._system = [{"role": "system", "content": text}] if text else []
            case "turn_context":
                self._model = get(payload, "model", str, "payload") or self._model
            case "event_msg" if payload.get("type") == "token_count":
                self.close()
            case "compacted":
                self.close()
                self._history = _compacted(payload)
            case "response_item":
                self._item(payload, _time(raw), source)

    def close(self) -> None:
        """The answer so far is complete."""
        if not self._answer:
            return
        answer = joined(self._answer)
        stop = StopReason.TOOL_USE if answer.get("tool_calls") else StopReason.END_TURN
        ended = max(self._sent_s, self._sent_s if self._last_s is None else self._last_s)
        self.calls.append(LoggedCall(self._source, self._prompt, (), answer, 0, self._sent_s, ended, stop, self._model))
        self._history.append(answer)
        self._answer = []

    def _item(self, payload: dict[str, Any], at_s: float, source: str) -> None:
        message = response_item(payload, "payload")
        if message is None:
            return
        if message["role"] == "assistant":
            if not self._answer:
                self._prompt = [*self._system, *self._history]
                self._source = source
                self._sent_s = at_s if self._last_s is None else self._last_s
                if not self._prompt:
                    raise FieldError("payload", "is an answer to nothing: the session's beginning is missing")
            self._answer.append(message)
        else:
            self.close()
            self._history.append(message)
        self._last_s = at_s if self._last_s is None else max(self._last_s, at_s)


def _compacted(payload: dict[str, Any]) -> list[Message]:
    replaced = get(payload, "replacement_history", list, "payload")
    if replaced is None:
        return [{"role": "user", "content": text_of(payload.get("message"), "payload.message")}]
    history = []
    for index, item in enumerate(replaced):
        at = f"payload.replacement_history[{index}]"
        if not isinstance(item, dict):
            raise FieldError(at, "must be an object")
        message = response_item(item, at)
        if message is not None:
            history.append(message)
    return history


def _time(raw: dict[str, Any]) -> float:
    text = get(raw, "timestamp", str)
    if text is None:
        raise FieldError("timestamp", "is missing")
    try:
        return seconds(text)
    except (ValueError, OverflowError) as error:
        raise FieldError("timestamp", "must be an ISO-8601 time") from error


register(TraceFormat("codex", _matches, _read))
