"""Mooncake format (FAST'25 traces): one request a line, open loop, global block ids.

A ``.jsonl`` file (also ``.xz``, ``.gz``) with lines ``{timestamp, input_length, output_length, hash_ids}``:
milliseconds, tokens, and one id per block of 512 tokens, the partial last block included.

How it is read: the trace does not say which requests belong to one conversation, so every line is a session of
one turn. Its id is the line number (from 1); ``start_s`` of its turn is ``timestamp / 1000``, on the one clock
of the trace. Ids are comparable across the whole file (``BlockScope.GLOBAL``). The id of a partial last block
is dropped: whether another prompt with it has the same tokens depends on both lengths.

Not supported: conversations, think times, tool definitions and stop reasons, since the format has none; a reply
becomes part of a later prompt without the trace saying so, so theoretical rates count prompts only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from traces.model import MAIN_FLOW, BlockScope, Flow, Session, TraceError, Turn
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import LINE_FILES, Document, first_object, line_documents, parse_object
from traces.readers.ids import ChainCheck, block_ids, full_blocks
from traces.readers.validate import Milliseconds, OutputTokens, PromptTokens, validated

BLOCK_SIZE = 512


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: OutputTokens
    hash_ids: Any


def _matches(path: str) -> bool:
    # Recognised by any of its fields: a file whose first line lacks one deserves to be told which.
    return path.endswith(LINE_FILES) and bool(_Line.model_fields.keys() & (first_object(path) or {}).keys())


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(line_documents(path), _Parser(reading.stats.ignored))


class _Parser:
    """Parses one line; ids must be chained over the whole file, so it remembers who follows whom."""

    def __init__(self, ignored: Counter[str]) -> None:
        self._chain = ChainCheck()
        self._ignored = ignored

    def __call__(self, line: Document) -> Session:
        number = line.source.rpartition(":")[2]
        parsed = validated(_Line, parse_object(line), line.source, session=number, turn=0, ignored=self._ignored)
        ids = block_ids(parsed.hash_ids)
        if ids is None:
            raise self._error("must be a list of 64-bit integers", line, "hash_ids")
        full = full_blocks(ids, parsed.input_length, BLOCK_SIZE)
        if full is None:
            message = (
                f"has {len(ids)} ids, but a prompt of {parsed.input_length} tokens has "
                f"{-(-parsed.input_length // BLOCK_SIZE)} blocks of {BLOCK_SIZE}; one id per block is needed"
            )
            raise self._error(message, line, "hash_ids")
        fault = self._chain.fault(full[0], full[0][:0])
        if fault is not None:
            raise self._error(fault, line, "hash_ids")
        start = parsed.timestamp / 1000
        turn = Turn(0, start, parsed.input_length, parsed.output_length, full[0])
        main = Flow(MAIN_FLOW, (turn,), start_s=start)
        return Session(number, BLOCK_SIZE, BlockScope.GLOBAL, main, source=line.source)

    @staticmethod
    def _error(message: str, line: Document, field: str) -> TraceError:
        return TraceError(message, file=line.source, session=line.source.rpartition(":")[2], turn=0, field=field)


register(TraceFormat("mooncake", _matches, _read, last=True))
