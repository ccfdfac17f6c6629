"""Codex sessions: the client's own log (``sessions/YYYY/MM/DD/rollout-*.jsonl``).

A ``.jsonl`` file is one session, or a directory of them (searched recursively). What a line holds and how prompts
follow from it is ``traces.logs.codex``'s.

How it is read: each answer is a request, sent at the time of the item before it. A request that ended with a tool call
stopped for it. Messages become tokens by the served model's template and tokenizer: one is needed. Tools are not in
the log, so prompts are shorter than those that were sent (noted).

Not supported: reasoning that is encrypted stands as a digest; subagents are sessions of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from traces.logs.codex import CodexCall, CodexLog, is_record
from traces.logs.fields import FieldError
from traces.logs.messages import openai_dicts
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, TraceError
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, LoggedCall, logged_turns
from traces.readers.files import LINE_FILES, files_of, first_object, line_documents, parse_object
from traces.readers.ids import TokenBlocks
from traces.text import ChatTokenizer


def _matches(path: str) -> bool:
    if Path(path).is_dir():
        first = next(iter(sorted(Path(path).rglob("*.jsonl"))), None)
        return first is not None and is_record(first_object(str(first)))
    return path.endswith(LINE_FILES) and is_record(first_object(path))


def _read(path: str, reading: Reading) -> Iterator[Session]:
    parse = partial(_session, tokenizer=reading.text_tokenizer(path), notes=reading.stats.notes)
    return reading.parsed(iter(files_of(Path(path), LINE_FILES)), parse)


def _session(path: Path, tokenizer: ChatTokenizer, notes: list[str]) -> Session:
    log = CodexLog()
    found: list[CodexCall | None] = []
    for line in line_documents(path):
        raw = parse_object(line)
        try:
            if raw.get("type") == "response_item" and raw.get("timestamp") is None:
                raise FieldError("timestamp", "is missing")
            found.append(log.add(raw, line.source))
        except FieldError as error:
            raise TraceError(str(error), file=line.source, session=log.session or None, field=error.field) from error
    found.append(log.end())
    name = log.session or path.name.partition(".")[0]
    calls = [_logged(call, name) for call in found if call is not None]
    if not calls:
        raise TraceError("no answer of the model in it; is it a session?", file=str(path), session=name)
    notes.append(f"{path}, session {name}: tools are not in the log; prompts are shorter than sent")
    blocks = TokenBlocks(BLOCK_SIZE)
    turns = logged_turns(calls, tokenizer, blocks, origin_s=calls[0].sent_s, session=name)
    return Session(name, BLOCK_SIZE, BlockScope.SESSION, Flow(MAIN_FLOW, turns), source=str(path))


def _logged(call: CodexCall, session: str) -> LoggedCall:
    if not call.messages:
        message = "is an answer to nothing: the session's beginning is missing"
        raise TraceError(message, file=call.source, session=session, field="payload")
    return LoggedCall(
        source=call.source,
        messages=openai_dicts(call.messages),
        answer=call.answer.as_openai(),
        sent_s=call.sent_s or 0.0,
        ended_s=call.ended_s,
        stop=StopReason.TOOL_USE if call.answer.calls else StopReason.END_TURN,
        model=call.model,
    )


register(TraceFormat("codex", _matches, _read))
