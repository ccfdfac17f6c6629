"""Codex session files (``sessions/YYYY/MM/DD/rollout-*.jsonl``).

A line is ``{timestamp, type, payload}`` with type ``session_meta``, ``turn_context``, ``response_item``, ``event_msg``
or ``compacted``. A call is a run of items that the model wrote (reasoning, message, tool calls); its prompt is all
items before. ``event_msg`` of type ``token_count`` holds the server's count (``info.last_token_usage``). Tools are not
in the file, and encrypted reasoning stands as a digest. Field names as found in public descriptions of the format
(ccusage's ``apps/codex``, codex-rs' rollout).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from eval.diagnose.chat import Call, Message, Request
from eval.diagnose.logs.base import Line, LogError, LogFormat, Skip, seconds
from eval.diagnose.logs.base import field as get
from eval.diagnose.logs.messages import response_item, response_items, text_of

_TYPES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")
_OWN = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")


def _fits(value: dict[str, Any]) -> bool:
    return value.get("type") in _TYPES and isinstance(value.get("payload"), dict)


@dataclass
class _Rollout:
    skip: Skip
    session: str = ""
    system: tuple[Message, ...] = ()
    model: str = ""
    history: list[Message] = field(default_factory=list)
    compacted: bool = False  # since the last call
    run: list[Message] = field(default_factory=list)  # what the model wrote since `before`
    before: tuple[Message, ...] = ()
    where: str = ""
    at_s: float | None = None
    usage: dict[str, Any] | None = None
    open: bool = False  # the run may go on

    def call(self) -> Call | None:
        """The run as a call, and forget it; a faulty one is passed over."""
        run, usage, compacted = self.run, self.usage or {}, self.compacted
        self.run, self.usage = [], None
        if not run:
            return None
        self.compacted = False
        try:
            return Call(
                where=self.where,
                request=Request((*self.system, *self.before), compacted=compacted),
                session=self.session,
                answer=tuple(run),
                prompt_tokens=get(usage, "input_tokens", int),
                cached_tokens=get(usage, "cached_input_tokens", int),
                at_s=self.at_s,
                model=self.model,
            )
        except LogError as error:
            self.skip(f"{self.where}: {error}")
            return None


def _read(lines: Iterator[Line], skip: Skip) -> Iterator[Call]:
    state = _Rollout(skip)
    for where, value in lines:
        try:
            made = _take(state, where, value)
        except LogError as error:
            skip(f"{where}: {error}")
            continue
        if made is not None:
            yield made
    if (last := state.call()) is not None:
        yield last


FORMAT = LogFormat("codex", _fits, _read)


def _take(state: _Rollout, where: str, value: dict[str, Any]) -> Call | None:
    payload = get(value, "payload", dict)
    if payload is None:
        raise LogError("field 'payload' is missing; is this a Codex session?")
    match value.get("type"):
        case "session_meta":
            state.session = get(payload, "id", str) or state.session
            instructions = payload.get("base_instructions") or payload.get("instructions")
            if isinstance(instructions, dict):
                instructions = instructions.get("text")
            state.system = (Message("system", text_of(instructions)),) if instructions else ()
        case "turn_context":
            state.model = get(payload, "model", str) or state.model
        case "compacted":
            made = state.call()
            replaced = payload.get("replacement_history")
            state.history = list(
                response_items(replaced)
                if isinstance(replaced, list)
                else (Message("user", get(payload, "message", str) or ""),)
            )
            state.compacted, state.open = True, False
            return made
        case "event_msg" if payload.get("type") == "token_count":
            info = get(payload, "info", dict) or {}
            if state.run and state.usage is None:
                state.usage = get(info, "last_token_usage", dict)
            state.open = False
        case "response_item":
            return _item(state, where, value, payload)
    return None


def _item(state: _Rollout, where: str, value: dict[str, Any], payload: dict[str, Any]) -> Call | None:
    message = response_item(payload)
    if message is None:
        return None
    written = payload.get("type") in _OWN or message.role == "assistant"
    made = None
    if written:
        if not state.open:
            made = state.call()
            state.before, state.where = tuple(state.history), where
            state.at_s, state.open = seconds(value.get("timestamp")), True
        state.run.append(message)
    else:
        state.open = False
    state.history.append(message)
    return made
