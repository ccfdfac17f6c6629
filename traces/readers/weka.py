"""Weka format (kv-cache-tester): real coding sessions, one JSON object each.

A path may be one ``.json`` file, a directory of them (searched recursively), or a ``.tar`` (plain, ``.gz``,
``.xz``, ``.bz2``) that holds them; archives are streamed, one member at a time. A session::

    {id, block_size, hash_id_scope: "local" | "global", tool_tokens, system_tokens, requests: [...]}

An entry of ``requests`` is a request ``{t, type: "s" | "n", in, out, hash_ids, stop, think_time?, api_time?,
model?}`` or a subagent ``{type: "subagent", t, duration_ms, agent_id, tool_tokens, system_tokens, requests}``
whose requests count their ``t`` from the subagent's start. Times are seconds but for ``duration_ms``.

How it is read:

- ``hash_ids`` name full blocks. Where a collection rounds up, the id of the partial block is dropped.
- A subagent starts after the main turn that was sent last before it (``spawn_after``). The format does not say
  which turn waited for its result: most subagents end after the *next* main turn started, so they run in the
  background. ``join_before`` is the first main turn that was sent at or after the subagent's recorded end,
  which keeps the recorded order without making the main flow wait for what it did not wait for.
- A repeated ``agent_id`` gets a suffix (``a#2``), because flows need unique names.
- Accepted as found in the wild: ``out`` 0, missing think and API times, null durations, any other stop reason
  (read as unknown), turns that overlap their predecessor (noted).

Not supported: subagents inside subagents (refused); ``input_types``, ``output_types``, ``ttft`` and ``totals``
are ignored.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from traces.model import MAIN_FLOW, BlockIds, BlockScope, Flow, ReadStats, Session, StopReason, TraceError, Turn
from traces.readers import json_ids
from traces.readers.base import Reading, TraceFormat, register
from traces.readers.files import (
    CONTAINER_ERRORS,
    Document,
    files_of,
    open_stream,
    own_or_container_fault,
    read_bounded,
    read_file,
)
from traces.readers.ids import NO_IDS, ChainCheck, block_ids, full_blocks
from traces.readers.validate import Name, OutputTokens, PromptTokens, Seconds, count_ignored
from traces.spawn import attach

_ARCHIVES = (".tar", ".tar.xz", ".tar.gz", ".tgz", ".tar.bz2")
_FILES = (".json", ".json.xz", ".json.gz")


class _Strict(BaseModel):
    # Fields that we do not read may hold anything.
    model_config = ConfigDict(strict=True, extra="ignore")


class _Request(_Strict):
    type: Literal["s", "n"]
    t: Seconds
    prompt: Annotated[PromptTokens, Field(alias="in")]
    output: Annotated[OutputTokens, Field(alias="out")]
    hash_ids: Any  # checked when turned into an array: pydantic would copy millions of ids
    stop: str | None = None
    think_time: Seconds | None = None
    api_time: Seconds | None = None
    model: str | None = None


class _Subagent(_Strict):
    type: Literal["subagent"]
    t: Seconds
    requests: Annotated[list[_Request], Field(min_length=1)]
    agent_id: str | None = None
    duration_ms: Seconds | None = None
    models: Any = None  # each request names its own
    tool_tokens: OutputTokens = 0
    system_tokens: OutputTokens = 0


class _Session(_Strict):
    id: Name
    block_size: Annotated[int, Field(ge=1, le=1 << 20)]
    hash_id_scope: Literal["local", "global"]
    tool_tokens: OutputTokens = 0
    system_tokens: OutputTokens = 0
    models: Any = None  # each request names its own
    requests: list[Annotated[_Request | _Subagent, Field(discriminator="type")]]


def _matches(path: str) -> bool:
    return Path(path).is_dir() or path.endswith(_ARCHIVES + _FILES)


def _read(path: str, reading: Reading) -> Iterator[Session]:
    return reading.parsed(documents(Path(path)), partial(parse_session, stats=reading.stats))


def documents(path: Path) -> Iterator[Document]:
    """The sessions of a file, directory or archive, one in memory at a time."""
    if path.name.endswith(_ARCHIVES) and not path.is_dir():
        yield from _members(path)
    else:
        yield from map(read_file, files_of(path, _FILES))


def _members(path: Path) -> Iterator[Document]:
    empty = True
    try:
        # tarfile's own decompression takes a file that is cut between two members for a complete one.
        with open_stream(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name = Path(member.name).name
                wanted = name.endswith(".json") and name[0] != "."
                file = archive.extractfile(member) if wanted and member.isfile() else None
                if file is not None:
                    empty = False
                    source = f"{path}({member.name})"
                    yield Document(source, read_bounded(file, source))
            while stream.read(1 << 16):
                pass  # to the end, where a compressed file carries its checksum
    except CONTAINER_ERRORS as error:
        raise own_or_container_fault(path, error) from error
    if empty:
        raise TraceError("no .json member in this archive; is it a Weka collection?", file=str(path))


def parse_session(document: Document, stats: ReadStats) -> Session:
    """One session from its JSON; accepted oddities and ignored fields go to ``stats``.

    Raises:
        TraceError: naming file, session, turn and field.
    """
    try:
        raw, lists = json_ids.loads(document.raw)
    except orjson.JSONDecodeError as error:
        message = f"not valid JSON ({error}); the file is truncated or damaged, get it again or skip it (--skip-bad)"
        raise TraceError(message, file=document.source) from error
    return build_session(raw, document.source, stats, lists)


def build_session(raw: object, source: str, stats: ReadStats, lists: list[BlockIds] | None = None) -> Session:
    """One session from its parsed JSON; with ``lists`` each ``hash_ids`` is an index of them.

    Raises:
        TraceError: naming file, session, turn and field.
    """
    try:
        parsed = _Session.model_validate(raw)
    except ValidationError as error:
        raise _fault(source, raw, error) from error
    session = _Builder(source, parsed, stats.notes, lists).session()
    _count_ignored(cast(dict[str, Any], raw), stats.ignored)
    return session


def _count_ignored(raw: dict[str, Any], ignored: Counter[str]) -> None:
    count_ignored(_Session, raw, ignored)
    for entry in raw["requests"]:
        count_ignored(_Subagent if entry["type"] == "subagent" else _Request, entry, ignored)
        for inner in entry["requests"] if entry["type"] == "subagent" else ():
            count_ignored(_Request, inner, ignored)


class _Builder:
    """Turns one parsed file into a session, and checks what one entry alone does not show."""

    def __init__(self, source: str, parsed: _Session, notes: list[str], lists: list[BlockIds] | None) -> None:
        self._source = source
        self._parsed = parsed
        self._notes = notes
        self._lists = lists
        self._chain = ChainCheck()
        self._rounded_up = 0
        self._overlapping = 0

    def session(self) -> Session:
        parsed = self._parsed
        requests = [(at, e) for at, e in enumerate(parsed.requests) if isinstance(e, _Request)]
        if not requests:
            raise self._error("no request of the session itself (only subagents or nothing)", None, None, "requests")
        origin = min(entry.t for entry in parsed.requests)
        turns = self._turns(MAIN_FLOW, requests, "requests", -origin)
        main = Flow(MAIN_FLOW, turns, parsed.tool_tokens, parsed.system_tokens, start_s=turns[0].start_s)
        subagents: list[Flow] = []
        for at, entry in enumerate(parsed.requests):
            if isinstance(entry, _Subagent):
                name = self._unique_name(entry.agent_id or "subagent", {MAIN_FLOW, *(f.name for f in subagents)})
                subagents.append(self._subagent(name, at, entry, origin, turns))
        self._take_notes()
        return Session(
            id=parsed.id,
            block_size=parsed.block_size,
            scope=BlockScope.SESSION if parsed.hash_id_scope == "local" else BlockScope.GLOBAL,
            main=main,
            subagents=tuple(subagents),
            source=self._source,
        )

    def _subagent(self, name: str, at: int, entry: _Subagent, origin: float, main: Sequence[Turn]) -> Flow:
        start = entry.t - origin
        turns = self._turns(name, list(enumerate(entry.requests)), f"requests[{at}].requests", start)
        duration = None if entry.duration_ms is None else entry.duration_ms / 1000
        end = turns[-1].start_s + (turns[-1].api_s or 0.0) if duration is None else start + duration
        spawn_after, join_before = attach(start, end, main)
        return Flow(
            name=name,
            turns=turns,
            tool_tokens=entry.tool_tokens,
            system_tokens=entry.system_tokens,
            spawn_after=spawn_after,
            join_before=join_before,
            start_s=start,
            duration_s=duration,
        )

    def _turns(self, flow: str, requests: list[tuple[int, _Request]], field: str, offset: float) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        for index, (at, request) in enumerate(requests):
            ids = self._ids(flow, index, request, f"{field}[{at}]", turns[-1].block_ids if turns else None)
            turn = Turn(
                index=index,
                start_s=request.t + offset,
                prompt_tokens=request.prompt,
                output_tokens=request.output,
                block_ids=ids,
                think_s=request.think_time,
                api_s=request.api_time,
                stop=_STOP_REASONS.get(request.stop or "", StopReason.UNKNOWN),
                model=request.model or "",
            )
            if turns and turn.start_s < turns[-1].start_s:
                message = f"was sent before its predecessor ({request.t} s); requests must be sorted by time"
                raise self._error(message, flow, index, f"{field}[{at}].t")
            if turns and turn.start_s < turns[-1].start_s + (turns[-1].api_s or 0.0):
                self._overlapping += 1
            turns.append(turn)
        return tuple(turns)

    def _ids(self, flow: str, turn: int, request: _Request, entry: str, before: BlockIds | None) -> BlockIds:
        field = f"{entry}.hash_ids"
        ids = block_ids(request.hash_ids) if self._lists is None else self._lists[request.hash_ids]
        if ids is None:
            raise self._error("must be a list of 64-bit integers", flow, turn, field)
        size = self._parsed.block_size
        full = full_blocks(ids, request.prompt, size)
        if full is None:
            message = (
                f"has {len(ids)} ids, but a prompt of {request.prompt} tokens in blocks of {size} has "
                f"{request.prompt // size} full ones; one id per full block is needed"
            )
            raise self._error(message, flow, turn, field)
        ids, rounded_up = full
        self._rounded_up += rounded_up
        fault = self._chain.fault(ids, NO_IDS if before is None else before)
        if fault is not None:
            raise self._error(fault, flow, turn, field)
        return ids

    def _unique_name(self, name: str, taken: set[str]) -> str:
        if name not in taken:
            return name
        fresh = next(f"{name}#{n}" for n in range(2, len(taken) + 3) if f"{name}#{n}" not in taken)
        self._note(f"subagent id '{name}' is not unique; read as '{fresh}'")
        return fresh

    def _take_notes(self) -> None:
        if self._rounded_up:
            self._note(f"{self._rounded_up} turns have an id for the partial last block; it was dropped")
        if self._overlapping:
            self._note(f"{self._overlapping} turns start before their predecessor ended")

    def _note(self, text: str) -> None:
        self._notes.append(f"{self._source}, session {self._parsed.id}: {text}")

    def _error(self, message: str, flow: str | None, turn: int | None, field: str) -> TraceError:
        return TraceError(message, file=self._source, session=self._parsed.id, flow=flow, turn=turn, field=field)


_STOP_REASONS = {reason.value: reason for reason in StopReason}


def _fault(source: str, raw: object, error: ValidationError) -> TraceError:
    """pydantic's first complaint, told in the words of the trace."""
    first = error.errors(include_url=False, include_input=False)[0]
    # pydantic puts the tag of a union ("s", "n", "subagent") into the location; the file has no such level.
    path = [part for at, part in enumerate(first["loc"]) if at != 2 or len(first["loc"]) < 4]
    session = raw.get("id") if isinstance(raw, dict) else None
    entries = raw.get("requests") if isinstance(raw, dict) else None
    flow, turn, message = None, None, first["msg"]
    if len(path) > 1 and isinstance(path[1], int) and isinstance(entries, list):
        entry = entries[path[1]]
        if _type(entry) == "subagent":
            flow = str(entry.get("agent_id") or "subagent")
            turn = path[3] if len(path) > 3 and isinstance(path[3], int) else None
            if turn is not None and _type(entry["requests"][turn]) == "subagent":
                message = "a subagent inside a subagent is not supported; flatten it or skip it (--skip-bad)"
        else:
            turn = sum(_type(other) != "subagent" for other in entries[: path[1]])
        if len(path) == 2:
            path.append("type")
            message = f"unknown type {_type(entry)!r}; known are 's', 'n' and 'subagent'"
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return TraceError(
        message[0].lower() + message[1:],
        file=source,
        session=session if isinstance(session, str) else None,
        flow=flow,
        turn=turn if isinstance(turn, int) else None,
        field=field or None,
    )


def _type(entry: object) -> object:
    return entry.get("type") if isinstance(entry, dict) else None


register(TraceFormat("weka", _matches, _read, last=True))
