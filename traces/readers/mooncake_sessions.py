"""Mooncake format with sessions, as AIPerf extends it: one request a line, each saying what is new ("delta").

A ``.jsonl`` file (also ``.xz``, ``.gz``, ``.bz2``) with lines ``{session_id, timestamp? | delay?, output_length,
...}`` and one of

- ``input_length``: tokens that are new in this request, after the history and its replies; with ``context_mode:
  "message_array_with_responses"`` the length of the whole prompt, and ``hash_ids`` name its blocks of 512 tokens;
- ``messages`` (and ``tools``): the whole prompt, or with ``message_mode: "delta"`` the new messages only.

``timestamp`` and ``delay`` (since the previous answer) are milliseconds. Field definitions: AIPerf's
``docs/benchmark-modes/trace-replay.md`` and ``MooncakeTrace`` in ``dataset/loader/models.py``.

How it is read: the lines of one ``session_id`` are a session, in the order of the file. The first line of a session
decides of which kind it is. Lengths: a prompt is the previous prompt, its answer and ``input_length`` new tokens;
ids of 64-token blocks are made accordingly, so sessions share nothing. Whole prompts with ``hash_ids``: ids are
comparable across the trace (``BlockScope.GLOBAL``) and may name contents alone, so they are chained here;
``start_s`` is on the clock of the trace. Messages: tokens of the served model's template and tokenizer, which is
needed; in delta mode a reply stands as ``output_length`` tokens found nowhere else. A request without ``timestamp``
starts ``delay`` after the previous one was sent, since how long the answer took is unknown. The file is read twice,
since sessions may be mixed.

Not supported: ``text_input``, ``payload`` and mixed kinds in a session (refused); ``hash_ids`` of deltas are
ignored (noted), since blocks of a delta are no blocks of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict

from traces.logs.fields import FieldError
from traces.logs.messages import chat_messages, openai_dicts
from traces.model import MAIN_FLOW, BlockIds, BlockScope, Flow, Session, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.conversation import BLOCK_SIZE, LoggedCall, Replies, ScriptedFlow, logged_turns
from traces.readers.files import LINE_FILES, Document, Group, each_line, first_object, grouped_lines, parse_object
from traces.readers.ids import MAX_PROMPT_TOKENS, NO_IDS, Chainer, FreshBlocks, TokenBlocks, block_ids, full_blocks
from traces.readers.tracelab import session_key
from traces.readers.validate import Milliseconds, Name, OutputTokens, PromptTokens, validated

MOONCAKE_BLOCK = 512
WHOLE_PROMPTS = "message_array_with_responses"


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: Name
    input_length: PromptTokens | None = None
    output_length: OutputTokens = 0
    hash_ids: Any = None
    messages: Any = None
    tools: list[dict[str, Any]] | None = None
    message_mode: str = "history"
    context_mode: str | None = None
    timestamp: Milliseconds | None = None
    delay: Milliseconds | None = None
    model: str | None = None


_Lines = list[tuple[Document, _Line]]


def _matches(path: str) -> bool:
    first = first_object(path) if path.endswith(LINE_FILES) else None
    return first is not None and "session_id" in first and ("input_length" in first or "output_length" in first)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(
        grouped_lines(path, each_line(session_key)), partial(_session, reading=reading, chain=Chainer())
    )


def _session(group: Group, reading: Reading, chain: Chainer) -> Session:
    lines = [
        (line, validated(_Line, parse_object(line), line.source, ignored=reading.stats.ignored)) for line in group.lines
    ]
    kind = _kind(lines[0][1])
    for index, (line, parsed) in enumerate(lines):
        if _kind(parsed) != kind:
            message = f"is of another kind ({_kind(parsed)}) than the session's first line ({kind}); split the session"
            raise TraceError(message, file=line.source, session=group.key, turn=index)
    starts = _starts(lines)
    source = lines[0][0].source
    scope, size = BlockScope.SESSION, BLOCK_SIZE
    if kind == "new tokens":
        turns = _deltas(lines, starts, reading)
    elif kind == "whole prompts":
        turns = tuple(_whole(line, parsed, index, starts[index], chain) for index, (line, parsed) in enumerate(lines))
        scope, size = BlockScope.GLOBAL, MOONCAKE_BLOCK
    else:
        turns = _texts(lines, starts, reading, kind == "new messages")
    return Session(group.key, size, scope, Flow(MAIN_FLOW, turns, start_s=turns[0].start_s), source=source)


def _kind(line: _Line) -> str:
    if line.messages is not None:
        return "new messages" if line.message_mode == "delta" else "all messages"
    return "whole prompts" if line.context_mode == WHOLE_PROMPTS else "new tokens"


def _starts(lines: _Lines) -> list[float]:
    starts: list[float] = []
    for index, (line, parsed) in enumerate(lines):
        before = starts[-1] if starts else 0.0
        start = before + (parsed.delay or 0.0) / 1000 if parsed.timestamp is None else parsed.timestamp / 1000
        if start < before:
            message = "was sent before its predecessor; lines of a session must be sorted by time"
            raise TraceError(message, file=line.source, session=parsed.session_id, turn=index, field="timestamp")
        starts.append(start)
    whole = lines[0][1].context_mode == WHOLE_PROMPTS and lines[0][1].messages is None
    # Ids of whole prompts compare across sessions, and so must their times.
    return starts if whole else [start - starts[0] for start in starts]


def _think(parsed: _Line) -> float | None:
    return None if parsed.delay is None else parsed.delay / 1000


def _length(line: Document, parsed: _Line, index: int) -> int:
    if parsed.input_length is None:
        message = "is missing, and so are messages; one of them must say what the request holds"
        raise TraceError(message, file=line.source, session=parsed.session_id, turn=index, field="input_length")
    return parsed.input_length


def _deltas(lines: _Lines, starts: list[float], reading: Reading) -> tuple[Turn, ...]:
    blocks = FreshBlocks(BLOCK_SIZE)
    turns: list[Turn] = []
    for index, (line, parsed) in enumerate(lines):
        before = turns[-1] if turns else None
        held = before.prompt_tokens + before.output_tokens if before else 0
        prompt = held + _length(line, parsed, index)
        if prompt > MAX_PROMPT_TOKENS:
            message = f"makes a prompt of {prompt} tokens with its history; at most {MAX_PROMPT_TOKENS} can be"
            raise TraceError(message, file=line.source, session=parsed.session_id, turn=index, field="input_length")
        # What a prompt shares ends in the middle of a block; that block's beginning is the prompt's tail.
        ids = blocks.ids(prompt, before.prompt_tokens if before else 0, before.block_ids if before else NO_IDS)
        turns.append(
            Turn(index, starts[index], prompt, parsed.output_length, ids, _think(parsed), model=parsed.model or "")
        )
    if any(parsed.hash_ids is not None for _, parsed in lines):
        line, parsed = lines[0]
        text = "hash_ids of new tokens are no blocks of the prompt; what sessions share is not read"
        reading.stats.notes.append(f"{line.source}, session {parsed.session_id}: {text}")
    return tuple(turns)


def _whole(line: Document, parsed: _Line, index: int, start_s: float, chain: Chainer) -> Turn:
    prompt = _length(line, parsed, index)
    ids: BlockIds | None = block_ids([] if parsed.hash_ids is None else parsed.hash_ids)
    full = None if ids is None else full_blocks(ids, prompt, MOONCAKE_BLOCK)
    if full is None:
        message = f"must be integers, one per block of {MOONCAKE_BLOCK} tokens; the prompt has {prompt} tokens"
        raise TraceError(message, file=line.source, session=parsed.session_id, turn=index, field="hash_ids")
    chained = chain.chained(full[0])
    return Turn(index, start_s, prompt, parsed.output_length, chained, _think(parsed), model=parsed.model or "")


def _texts(lines: _Lines, starts: list[float], reading: Reading, deltas: bool) -> tuple[Turn, ...]:
    first, head = lines[0]
    tokenizer = reading.text_tokenizer(first.source)
    blocks = TokenBlocks(BLOCK_SIZE)
    calls = []
    flow = ScriptedFlow(tokenizer, Replies(), head.session_id)
    turns = []
    for index, (line, parsed) in enumerate(lines):
        try:
            messages = openai_dicts(chat_messages(parsed.messages))
        except FieldError as error:
            raise TraceError(
                str(error), file=line.source, session=head.session_id, turn=index, field=error.field
            ) from error
        output = parsed.output_length
        if deltas:
            ids = blocks.ids(prompt := flow.turn(messages, parsed.tools, output, line.source, index))
            turns.append(Turn(index, starts[index], len(prompt), output, ids, _think(parsed), model=parsed.model or ""))
        else:
            calls.append(
                LoggedCall(
                    line.source, messages, parsed.tools or [], None, output, starts[index], model=parsed.model or ""
                )
            )
    if not deltas:
        return logged_turns(calls, tokenizer, blocks, origin_s=0.0, session=head.session_id)
    return tuple(turns)


register(TraceFormat("mooncake-sessions", _matches, _read))
