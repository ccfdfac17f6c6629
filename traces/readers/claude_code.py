"""Claude Code sessions: the client's own log, text and all (``projects/*/SESSION.jsonl`` and ``agent-*.jsonl``).

A ``.jsonl`` file is one session, or a directory of them (searched recursively). What a line holds and how prompts
follow from it is ``traces.logs.claude_code``'s.

How it is read: each answer is a request, sent at the time of its parent event. A file of sidechain events alone is a
session of its own. The log has neither system prompt nor tools, so prompts are shorter than those that were sent, and
what sessions share of them is lost (noted). Messages become tokens by the served model's template and tokenizer: one
is needed. Stop reasons and models are those of the log.

Not supported: thinking that the log has only encrypted is missing; images stand as a digest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from traces.logs.claude_code import ClaudeCall, ClaudeLog, is_event
from traces.logs.fields import FieldError
from traces.logs.messages import openai_dicts
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, TraceError
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, LoggedCall, logged_turns
from traces.readers.files import LINE_FILES, files_of, first_object, line_documents, parse_object
from traces.readers.ids import TokenBlocks
from traces.spawn import attach
from traces.text import ChatTokenizer

_STOPS = {"tool_use": StopReason.TOOL_USE, "end_turn": StopReason.END_TURN}


def _matches(path: str) -> bool:
    if Path(path).is_dir():
        first = next(iter(sorted(Path(path).rglob("*.jsonl"))), None)
        return first is not None and is_event(first_object(str(first)))
    return path.endswith(LINE_FILES) and is_event(first_object(path))


def _read(path: str, reading: Reading) -> Iterator[Session]:
    parse = partial(_session, tokenizer=reading.text_tokenizer(path), notes=reading.stats.notes)
    return reading.parsed(iter(files_of(Path(path), LINE_FILES)), parse)


def _session(path: Path, tokenizer: ChatTokenizer, notes: list[str]) -> Session:
    log = ClaudeLog()
    found: list[ClaudeCall] = []
    for line in line_documents(path):
        raw = parse_object(line)
        try:
            if raw.get("type") in ("user", "assistant") and raw.get("message") and raw.get("timestamp") is None:
                raise FieldError("timestamp", "is missing")
            ended = log.add(raw, line.source)
        except FieldError as error:
            raise TraceError(str(error), file=line.source, session=log.session or None, field=error.field) from error
        if ended is not None:
            found.append(ended)
    found += log.end()
    name = log.session or path.name.partition(".")[0]
    calls: dict[str, list[LoggedCall]] = {}
    for call in sorted(found, key=lambda call: call.order):
        if call.messages:  # else the beginning of the session is not in this file
            calls.setdefault(call.flow, []).append(_logged(call))
    if not calls:
        raise TraceError("no answer of the model in it; is it a session?", file=str(path), session=name)
    for own_calls in calls.values():
        own_calls.sort(key=lambda call: call.sent_s)
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


def _logged(call: ClaudeCall) -> LoggedCall:
    return LoggedCall(
        source=call.source,
        messages=openai_dicts(call.messages),
        answer=None if call.answer is None else call.answer.as_openai(),
        sent_s=call.sent_s or 0.0,
        ended_s=call.ended_s,
        stop=_STOPS.get(call.stop, StopReason.UNKNOWN) if isinstance(call.stop, str) else StopReason.UNKNOWN,
        model=call.model if isinstance(call.model, str) else "",
    )


register(TraceFormat("claude-code", _matches, _read))
