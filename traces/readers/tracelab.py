"""TraceLab rounds (uw-syfi/TraceLab): one model call of a Claude Code or Codex session a line, lengths and times only.

A ``.jsonl`` file (also ``.gz``, ``.xz``, ``.bz2``) with lines ``{session_id, round_index, model,
input_tokens_total, prefix_tokens, output_tokens, timing_events: [{event_type, timestamp}], tools: [...]}`` and
more. Field definitions: that repository's ``example_sessions/sanitized/README.md``; ``input_tokens_total =
prefix_tokens + newly_append_tokens``, the former being what the provider's cache hit.

How it is read: rounds of one ``session_id`` are a session, sorted by the time they were sent: the latest input
event (``user_message``, ``tool_result``), or the first output event where there is none. The answer ends with the
last output event. There are no block ids. As AIPerf's loader does, ids of 64-token blocks are made here: the first
``prefix_tokens // 64`` blocks of the previous round are kept, the rest is new. So what can be shared is what the
provider's cache hit: where its cache had expired, a prefix that really was the same looks new. A round with tools
ended for them, another one for the user. The file is read twice, since rounds of sessions are mixed.

Not supported: the file does not link subagents to their parents, so each is a session; rounds without any time
cannot be put in order and are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict

from traces.logs.fields import iso_seconds
from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import LINE_FILES, Document, Group, each_line, first_object, grouped_lines, parse_object
from traces.readers.ids import NO_IDS, FreshBlocks
from traces.readers.validate import OutputTokens, PromptTokens, validated

BLOCK_SIZE = 64
_INPUT_EVENTS = ("user_message", "tool_result")
_OUTPUT_EVENTS = ("text", "reasoning", "tool_call")
_FIELDS = {"session_id", "input_tokens_total", "prefix_tokens"}


class _Event(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    event_type: str
    timestamp: str | None = None


class _Round(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    session_id: str
    input_tokens_total: PromptTokens
    prefix_tokens: OutputTokens
    output_tokens: OutputTokens
    timing_events: list[_Event]
    model: str | None = None
    tools: list[Any] | None = None


def _matches(path: str) -> bool:
    return path.endswith(LINE_FILES) and (first_object(path) or {}).keys() >= _FIELDS


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(grouped_lines(path, each_line(session_key)), partial(_session, ignored=reading.stats.ignored))


def session_key(line: Document) -> str | None:
    """``session_id`` of a line; None for a line that has none."""
    try:
        raw = orjson.loads(line.raw)
    except orjson.JSONDecodeError:
        return None
    key = raw.get("session_id") if isinstance(raw, dict) else None
    return key if isinstance(key, str) and key else None


def _session(group: Group, ignored: Counter[str]) -> Session:
    rounds = []
    for line in group.lines:
        parsed = validated(_Round, parse_object(line), line.source, session=group.key or None, ignored=ignored)
        rounds.append((*_times(line, parsed, group.key), parsed))
    rounds.sort(key=lambda entry: entry[0])
    origin = rounds[0][0]
    blocks = FreshBlocks(BLOCK_SIZE)
    turns: list[Turn] = []
    for index, (sent, ended, call) in enumerate(rounds):
        before = turns[-1] if turns else None
        shared = min(call.prefix_tokens, call.input_tokens_total, before.prompt_tokens if before else 0)
        ids = blocks.ids(call.input_tokens_total, shared, before.block_ids if before else NO_IDS)
        turns.append(
            Turn(
                index=index,
                start_s=sent - origin,
                prompt_tokens=call.input_tokens_total,
                output_tokens=call.output_tokens,
                block_ids=ids,
                think_s=max(0.0, sent - rounds[index - 1][1]) if index else None,
                api_s=ended - sent,
                stop=StopReason.TOOL_USE if call.tools else StopReason.END_TURN,
                model=call.model or "",
            )
        )
    main = Flow(MAIN_FLOW, tuple(turns))
    return Session(group.key, BLOCK_SIZE, BlockScope.SESSION, main, source=group.lines[0].source)


def _times(line: Document, call: _Round, session: str) -> tuple[float, float]:
    """When a round was sent and when its answer ended, in POSIX seconds."""
    inputs: list[float] = []
    outputs: list[float] = []
    for at, event in enumerate(call.timing_events):
        target = {**dict.fromkeys(_INPUT_EVENTS, inputs), **dict.fromkeys(_OUTPUT_EVENTS, outputs)}.get(
            event.event_type
        )
        if target is None or event.timestamp is None:
            continue
        try:
            target.append(iso_seconds(event.timestamp))
        except (ValueError, OverflowError) as error:
            field = f"timing_events[{at}].timestamp"
            message = f"'{event.timestamp[:50]}' is no ISO-8601 time"
            raise TraceError(message, file=line.source, session=session, field=field) from error
    if not inputs and not outputs:
        message = "has no time of any input or output; give one or take the round out"
        raise TraceError(message, file=line.source, session=session, field="timing_events")
    sent = max(inputs) if inputs else min(outputs)
    return sent, max([sent, *outputs])


register(TraceFormat("tracelab", _matches, _read))
