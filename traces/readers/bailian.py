"""Qwen-Bailian usage traces (alibaba-edu/qwen-bailian-usagetraces-anon): one request a line, conversations linked.

A ``.jsonl`` file (also ``.xz``, ``.gz``, ``.bz2``) with lines ``{chat_id, parent_chat_id, timestamp, input_length,
output_length, type, turn, hash_ids}``: ``timestamp`` in seconds since the start of the trace, lengths in tokens,
one id per block of 16 tokens, ``parent_chat_id`` the request that this one goes on from, -1 for the first of a
conversation. Field definitions: the README of that repository.

How it is read: requests that are linked are one session, its id is the ``chat_id`` of its first request; turns are
sorted by time. Each request is complete, history included. Ids hash single blocks, so equal contents behind
different histories have equal ids; they are renumbered so that an id names its whole prefix. Ids are comparable
across the trace (``BlockScope.GLOBAL``), and so ``start_s`` is on the one clock of the trace. A parent that is not
in the file starts a session (noted). The file is read twice, since requests of conversations are mixed.

Not supported: ``type`` and ``turn`` are ignored; there are no tools, stop reasons and think times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from traces.model import MAIN_FLOW, BlockIds, BlockScope, Flow, Session, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import LINE_FILES, Document, Group, each_line, first_object, grouped_lines, parse_object
from traces.readers.ids import NO_IDS, Chainer, block_ids, full_blocks
from traces.readers.validate import OutputTokens, PromptTokens, Seconds, validated

BLOCK_SIZE = 16
NO_PARENT = -1

ChatId = Annotated[int, Field(ge=-1, lt=2**63)]


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    chat_id: Annotated[int, Field(ge=0, lt=2**63)]
    parent_chat_id: ChatId = NO_PARENT
    timestamp: Seconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: Any


def _matches(path: str) -> bool:
    return path.endswith(LINE_FILES) and {"chat_id", "hash_ids"} <= (first_object(path) or {}).keys()


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(grouped_lines(path, each_line(_Roots(reading.stats.notes))), _Parser(reading.stats.ignored))


class _Roots:
    """The first request of the conversation of each line."""

    def __init__(self, notes: list[str]) -> None:
        self._roots: dict[int, int] = {}
        self._notes = notes

    def __call__(self, line: Document) -> str | None:
        try:
            raw = orjson.loads(line.raw)
        except orjson.JSONDecodeError:
            return None
        chat = raw.get("chat_id") if isinstance(raw, dict) else None
        if type(chat) is not int:
            return None
        parent = raw.get("parent_chat_id", NO_PARENT)
        root = self._roots.get(parent) if type(parent) is int else None
        if root is None and parent != NO_PARENT:
            self._notes.append(
                f"{line.source}: its parent_chat_id {parent!r} is not in the file; read as a new session"
            )
        self._roots[chat] = chat if root is None else root
        return str(self._roots[chat])


class _Parser:
    """Turns the lines of one conversation into a session; contents are chained over the whole trace."""

    def __init__(self, ignored: Counter[str]) -> None:
        self._chainer = Chainer()
        self._ignored = ignored

    def __call__(self, group: Group) -> Session:
        parsed = [(line, self._line(line, group.key or None)) for line in group.lines]
        parsed.sort(key=lambda pair: pair[1].timestamp)
        turns: list[Turn] = []
        before = NO_IDS
        for at, (line, request) in enumerate(parsed):
            contents = self._contents(at, line, request, group.key)
            ids = self._chainer.chained(contents, (before, turns[-1].block_ids if turns else NO_IDS))
            turns.append(Turn(at, request.timestamp, request.input_length, request.output_length, ids))
            before = contents
        main = Flow(MAIN_FLOW, tuple(turns), start_s=turns[0].start_s)
        return Session(group.key, BLOCK_SIZE, BlockScope.GLOBAL, main, source=parsed[0][0].source)

    def _line(self, line: Document, session: str | None) -> _Line:
        return validated(_Line, parse_object(line), line.source, session=session, ignored=self._ignored)

    @staticmethod
    def _contents(index: int, line: Document, request: _Line, session: str) -> BlockIds:
        ids = block_ids(request.hash_ids)
        full = None if ids is None else full_blocks(ids, request.input_length, BLOCK_SIZE)
        if ids is None or full is None:
            message = (
                "must be a list of 64-bit integers"
                if ids is None
                else f"has {len(ids)} ids, but a prompt of {request.input_length} tokens has "
                f"{-(-request.input_length // BLOCK_SIZE)} blocks of {BLOCK_SIZE}; one id per block is needed"
            )
            raise TraceError(message, file=line.source, session=session, turn=index, field="hash_ids")
        return full[0]


register(TraceFormat("bailian", _matches, _read))
