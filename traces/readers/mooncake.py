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

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traces.model import MAIN_FLOW, BlockScope, Flow, Session, TraceError, Turn
from traces.readers.base import (
    CONTAINER_ERRORS,
    ChainCheck,
    Document,
    Reading,
    TraceFormat,
    block_ids,
    container_fault,
    full_blocks,
    open_stream,
    register,
)

BLOCK_SIZE = 512
_FILES = (".jsonl", ".jsonl.xz", ".jsonl.gz")


class _Line(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0)]
    hash_ids: Any


def _matches(path: str) -> bool:
    return path.endswith(_FILES)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(_lines(Path(path)), _Parser(path))


def _lines(path: Path) -> Iterator[Document]:
    try:
        with open_stream(path) as stream:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield Document(str(number), line)
    except CONTAINER_ERRORS as error:
        raise container_fault(path, error) from error


class _Parser:
    """Parses one line; ids must be chained over the whole file, so it remembers who follows whom."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._chain = ChainCheck()

    def __call__(self, line: Document) -> Session:
        number = line.source
        try:
            parsed = _Line.model_validate(orjson.loads(line.raw))
        except orjson.JSONDecodeError as error:
            message = f"not valid JSON ({error}); the line is truncated or damaged, restore it or skip it (--skip-bad)"
            raise self._error(message, number) from error
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise self._error(first["msg"].lower(), number, ".".join(map(str, first["loc"])) or None) from error
        ids = block_ids(parsed.hash_ids)
        if ids is None:
            raise self._error("must be a list of 64-bit integers", number, "hash_ids")
        full = full_blocks(ids, parsed.input_length, BLOCK_SIZE)
        if full is None:
            message = (
                f"has {len(ids)} ids, but a prompt of {parsed.input_length} tokens has "
                f"{-(-parsed.input_length // BLOCK_SIZE)} blocks of {BLOCK_SIZE}; one id per block is needed"
            )
            raise self._error(message, number, "hash_ids")
        fault = self._chain.fault(full[0], full[0][:0])
        if fault is not None:
            raise self._error(fault, number, "hash_ids")
        start = parsed.timestamp / 1000
        turn = Turn(0, start, parsed.input_length, parsed.output_length, full[0])
        main = Flow(MAIN_FLOW, (turn,), start_s=start)
        return Session(number, BLOCK_SIZE, BlockScope.GLOBAL, main, source=f"{self._path}(line {number})")

    def _error(self, message: str, line: str, field: str | None = None) -> TraceError:
        return TraceError(message, file=f"{self._path}(line {line})", session=line, turn=0, field=field)


register(TraceFormat("mooncake", _matches, _read))
