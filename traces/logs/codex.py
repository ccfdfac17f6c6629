"""Codex session files (``sessions/YYYY/MM/DD/rollout-*.jsonl``), record by record. Pure.

A line is ``{timestamp, type, payload}`` with type ``session_meta`` (``id``, ``base_instructions``), ``turn_context``
(``model``), ``response_item`` (items of OpenAI's responses API), ``event_msg`` (``token_count`` closes a request and
holds the server's count in ``info.last_token_usage``) or ``compacted`` (``message`` or ``replacement_history`` take the
place of the history). A call is a run of items that the model wrote (reasoning, messages, tool calls), up to a
``token_count`` or an item that it did not write; its prompt is the instructions and all items before. Not in such a
file: tools. Encrypted reasoning stands as a digest.

Field names as in TraceLab's ``example_sessions/codex/explanation.md`` and its sample, and in public descriptions of the
format (ccusage's ``apps/codex``, codex-rs' rollout).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from traces.logs.fields import FieldError, get, iso_time
from traces.logs.messages import Message, joined, response_item, response_items, text_of

_TYPES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")


def is_record(first: dict[str, Any] | None) -> bool:
    """Whether the first object of a file looks like one of these."""
    return first is not None and first.get("type") in _TYPES and isinstance(first.get("payload"), dict)


@dataclass(frozen=True, slots=True)
class CodexCall:
    """One answer of the model with its prompt.

    Attributes:
        source: of its first item.
        messages: the prompt; empty where the beginning of the session is not in the file.
        compacted: a summary took the place of the history since the last call.
        sent_s: time of the item before the answer, or of the answer; ended_s of its last item; since 1970.
        usage: the server's count, as it came; None: none.
    """

    source: str
    messages: tuple[Message, ...]
    answer: Message
    compacted: bool
    sent_s: float | None
    ended_s: float | None
    model: str
    usage: dict[str, Any] | None = None


@dataclass(slots=True)
class CodexLog:
    """One file's records so far.

    Attributes:
        session: its id, once a record has told it; else empty.
    """

    session: str = ""
    _model: str = ""
    _system: tuple[Message, ...] = ()
    _history: list[Message] = field(default_factory=list)
    _compacted: bool = False  # since the last call
    _answer: list[Message] = field(default_factory=list)  # of the open call
    _prompt: tuple[Message, ...] = ()
    _source: str = ""
    _sent_s: float | None = None
    _last_s: float | None = None  # of the last item
    _closed: CodexCall | None = None  # complete but for its usage, which comes behind it

    def add(self, raw: dict[str, Any], source: str) -> CodexCall | None:
        """Take a record; returns the call that it leaves behind, if any.

        Raises:
            FieldError: a wrong or missing field; the record is left out.
        """
        payload = get(raw, "payload", dict)
        if payload is None:
            raise FieldError("payload", "is missing; is it a record of a Codex session?")
        match raw.get("type"):
            case "session_meta":
                self.session = get(payload, "id", str, "payload") or self.session
                instructions = payload.get("base_instructions") or payload.get("instructions")
                if isinstance(instructions, dict):
                    instructions = instructions.get("text")
                text = text_of(instructions, "payload.base_instructions")
                self._system = (Message("system", text),) if text else ()
            case "turn_context":
                self._model = get(payload, "model", str, "payload") or self._model
            case "event_msg" if payload.get("type") == "token_count":
                self._close()
                usage = (get(payload, "info", dict, "payload") or {}).get("last_token_usage")
                if self._closed is not None and self._closed.usage is None and isinstance(usage, dict):
                    self._closed = replace(self._closed, usage=usage)
            case "compacted":
                history = _history_of(payload)
                self._close()
                self._history, self._compacted = list(history), True
            case "response_item":
                return self._item(payload, iso_time(raw), source)
        return None

    def end(self) -> CodexCall | None:
        """The last call, if it has not been given."""
        self._close()
        return self._give()

    def _item(self, payload: dict[str, Any], at_s: float | None, source: str) -> CodexCall | None:
        message = response_item(payload, "payload")
        if message is None:
            return None
        given = None
        if message.role != "assistant":
            self._close()
            self._history.append(message)
        else:
            if not self._answer:
                given = self._give()
                self._prompt, self._source = (*self._system, *self._history), source
                self._sent_s = at_s if self._last_s is None else self._last_s
            self._answer.append(message)
        if at_s is not None:
            self._last_s = at_s if self._last_s is None else max(self._last_s, at_s)
        return given

    def _close(self) -> None:
        """The answer so far is complete."""
        if not self._answer:
            return
        answer = joined(self._answer)
        times = [time for time in (self._sent_s, self._last_s) if time is not None]
        self._closed = CodexCall(
            source=self._source,
            messages=self._prompt,
            answer=answer,
            compacted=self._compacted,
            sent_s=self._sent_s,
            ended_s=max(times, default=None),
            model=self._model,
        )
        self._history.append(answer)
        self._answer, self._compacted = [], False

    def _give(self) -> CodexCall | None:
        given, self._closed = self._closed, None
        return given


def _history_of(payload: dict[str, Any]) -> tuple[Message, ...]:
    replaced = get(payload, "replacement_history", list, "payload")
    if replaced is not None:
        return response_items(replaced, "payload.replacement_history")
    return (Message("user", text_of(payload.get("message"), "payload.message")),)
