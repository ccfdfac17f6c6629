"""What the server's cache stored and dropped while a run went on: the file, and pages as small numbers.

``RUN/kv_events.jsonl`` begins with a ``header`` line, one more for each resume, and holds these lines::

    {"header": 1, "endpoint": ..., "page_size": 128, "pair_keys": false, "emptied": true}
    {"seq": 7, "ts": <server's clock, unix seconds>, "at": <run's clock, seconds>, "ops": [OP, ...]}
    {"session": ..., "flow": ..., "turn": ..., "prompt": RANGES, "answer": RANGES}     when a request ends
    {"fault": <why>, "at": <run's clock>}     an event that could not be read: none is written after it

    OP: ["store", tier, RANGES] | ["remove", tier, RANGES] | ["clear"]; tiers: 1 device, 2 host, 4 storage
    RANGES: [[first page number, count], ...]

A page number stands for one page of tokens and everything before it. Numbers are given in order of appearance, so a
prompt of hundreds of pages is a few ranges, and no token of anybody's prompt is in the file. ``seq`` is the server's
own number of a batch: a jump means that batches were lost, on the way or while nobody listened.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from traces.replay.record import ServerInfo

KV_EVENTS = "kv_events.jsonl"
SCHEMA = 1
PAIR_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
TIERS = {"GPU": 1, "CPU_PINNED": 2, "DISK": 4, "EXTERNAL": 4}

Tokens = npt.NDArray[np.int32]
Ranges = list[tuple[int, int]]


class EventError(ValueError):
    """Cache events that cannot be read. The message says where and what to do."""


class PageBook:
    """Numbers for pages. Thread-safe: events arrive beside the requests.

    Args:
        page_size: tokens per page.
        pair_keys: the server keys its cache by pairs of neighbouring tokens (EAGLE), so that a page of ``n`` pairs
            spans ``n + 1`` tokens.
    """

    def __init__(self, page_size: int, *, pair_keys: bool = False) -> None:
        self.page_size = page_size
        self.pair_keys = pair_keys
        self._numbers: dict[bytes, int] = {}
        self._of_hash: dict[int, bytes] = {}  # the server's block hash -> our digest
        self._lock = threading.Lock()
        self.unknown_parents = 0
        self.unknown_removed = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def path(self, tokens: Tokens) -> Ranges:
        """Page numbers of a sequence's full pages, int32 of shape (n,)."""
        keys = np.ascontiguousarray(tokens, dtype="<i4")
        if self.pair_keys:
            keys = np.stack((keys[:-1], keys[1:]), axis=1)
        with self._lock:
            digest, numbers = b"", []
            for end in range(self.page_size, len(keys) + 1, self.page_size):
                digest = _chained(digest, np.ascontiguousarray(keys[end - self.page_size : end]).tobytes())
                numbers.append(self._number(digest))
        return as_ranges(numbers)

    def pages_of(self, tokens: int) -> int:
        """Full pages of a sequence of so many tokens."""
        return max(0, tokens - self.pair_keys) // self.page_size

    def stored(self, event: dict[str, Any]) -> Ranges:
        """Pages of a ``BlockStored`` event.

        Raises:
            EventError: a field is missing, or token ids and hashes do not fit together.
        """
        try:
            hashes, size, parent = event["block_hashes"], int(event["block_size"]), event["parent_block_hash"]
            keys = np.asarray(event["token_ids"], dtype="<i4")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise EventError(f"a BlockStored event without a usable {error}") from error
        if size != self.page_size or len(keys) != size * len(hashes) or (keys.ndim == 2) != self.pair_keys:
            raise EventError(
                f"a BlockStored event of {len(hashes)} blocks of {size} with token ids of shape {keys.shape}; expected "
                f"pages of {self.page_size}{' pairs' if self.pair_keys else ''}"
            )
        with self._lock:
            if parent is None:
                digest = b""
            else:
                if parent not in self._of_hash:
                    self.unknown_parents += 1
                    self._of_hash[parent] = _chained(b"unknown", str(parent).encode())
                digest = self._of_hash[parent]
            numbers = []
            for k, block in enumerate(hashes):
                digest = _chained(digest, keys[k * size : (k + 1) * size].tobytes())
                self._of_hash[block] = digest
                numbers.append(self._number(digest))
        return as_ranges(numbers)

    def removed(self, event: dict[str, Any]) -> Ranges:
        """Pages of a ``BlockRemoved`` event; blocks that nobody saw being stored are counted and left out."""
        numbers = []
        with self._lock:
            for block in event.get("block_hashes", ()):
                digest = self._of_hash.get(block)
                if digest is None:
                    self.unknown_removed += 1
                else:
                    numbers.append(self._number(digest))
        return as_ranges(numbers)

    def _number(self, digest: bytes) -> int:
        return self._numbers.setdefault(digest, len(self._numbers))


def _chained(digest: bytes, page: bytes) -> bytes:
    return hashlib.blake2b(digest + page, digest_size=16).digest()


def as_ranges(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges (first, count), in their order."""
    ranges: Ranges = []
    for number in numbers:
        if ranges and number == ranges[-1][0] + ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + 1)
        else:
            ranges.append((number, 1))
    return ranges


def operations(events: Iterable[dict[str, Any]], book: PageBook) -> list[list[Any]]:
    """The ops of one batch, in order.

    Raises:
        EventError: an event of an unknown kind, or a faulty one.
    """
    ops: list[list[Any]] = []
    for event in events:
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "BlockStored":
            ops.append(["store", tier_of(event), book.stored(event)])
        elif kind == "BlockRemoved":
            ops.append(["remove", tier_of(event), book.removed(event)])
        elif kind == "AllBlocksCleared":
            ops.append(["clear"])
        else:
            raise EventError(f"a cache event of unknown type {kind!r}: the server is no SGLang 0.5.23")
    return ops


def tier_of(event: dict[str, Any]) -> int:
    medium = str(event.get("medium") or "GPU")
    if medium not in TIERS:
        raise EventError(f"a cache event in an unknown tier {medium!r}; known are {', '.join(TIERS)}")
    return TIERS[medium]


def endpoint_of(server: ServerInfo) -> str | None:
    """Where the server publishes its events, as a client reaches it; None where it publishes none."""
    config = server.args.get("kv_events_config")
    if not isinstance(config, str) or not config:
        return None
    try:
        settings = orjson.loads(config)
        endpoint = settings.get("endpoint", "tcp://*:5557") if settings.get("publisher") == "zmq" else None
    except (orjson.JSONDecodeError, AttributeError):
        return None
    if endpoint is None:
        return None
    host = urlsplit(server.base_url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    for wildcard in ("*", "0.0.0.0", "[::]"):
        if endpoint.startswith(f"tcp://{wildcard}:"):
            return f"tcp://{host}:{endpoint.rsplit(':', 1)[1]}"
    return str(endpoint)


def pair_keys(server: ServerInfo) -> bool:
    """Whether the server's cache is keyed by pairs of tokens, as SGLang's own is with EAGLE (``TreeCore.is_eagle``)."""
    if server.speculation is not None and server.speculation.keys is not None:
        return server.speculation.keys == "pair"
    return str(server.args.get("speculative_algorithm") or "").upper() in PAIR_ALGORITHMS


# -- reading ----------------------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EventHeader(_Line):
    header: Literal[1]
    endpoint: str
    page_size: int
    pair_keys: bool
    emptied: bool  # the cache was emptied, and the server said so, before the first request


class EventBatch(_Line):
    seq: int
    ts: float  # server's clock, unix seconds: when it published the batch
    at: float  # run's clock, seconds: when it arrived
    ops: tuple[tuple[Literal["store", "remove"], int, tuple[tuple[int, int], ...]] | tuple[Literal["clear"]], ...]


class RequestPages(_Line):
    session: str
    flow: str
    turn: int
    prompt: tuple[tuple[int, int], ...]
    answer: tuple[tuple[int, int], ...]


class EventFault(_Line):
    fault: str
    at: float


class Gap(NamedTuple):
    """Batches that never came, or were not read."""

    after_s: float  # run's clock
    batches: int | None  # None: not known
    why: str


@dataclass(slots=True)
class KvEvents:
    """All of the file.

    Attributes:
        batches: in the server's order; ``at`` is when the server published it, on the run's clock as well as it can be
            known: the server's times, moved by the smallest delay seen.
        gaps: where the server's numbers jump.
        cut_lines: a half-written last line that was left out.
    """

    header: EventHeader
    batches: list[EventBatch] = field(default_factory=list)
    paths: dict[tuple[str, str, int], RequestPages] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    cut_lines: int = 0


def read_events(run: Path) -> KvEvents | None:
    """The cache events of a run directory; None where none were recorded.

    Raises:
        EventError: a faulty line (names file and line), or another page size after a resume.
    """
    file = run / KV_EVENTS
    if not file.exists():
        return None
    events: KvEvents | None = None
    segment: list[EventBatch] = []
    last: EventBatch | None = None
    for number, raw in enumerate(_whole_lines(file), start=1):
        if raw is None:
            if events is not None:
                events.cut_lines += 1
            break
        line = _parsed(raw, f"{file}, line {number}")
        if isinstance(line, EventHeader):
            if events is None:
                events = KvEvents(line)
            elif line.page_size != events.header.page_size or line.pair_keys != events.header.pair_keys:
                raise EventError(f"{file}, line {number}: the server's pages changed within the run; report it without "
                                 f"events: remove {KV_EVENTS}")  # fmt: skip
            else:
                events.batches += _on_one_clock(segment)
                segment = []
        elif events is None:
            raise EventError(f"{file}, line {number}: the file does not begin with its header; remove it to go on")
        elif isinstance(line, EventBatch):
            if last is not None and line.seq > last.seq + 1:
                events.gaps.append(Gap(last.at, line.seq - last.seq - 1, "lost on the way, or nobody listened"))
            elif last is not None and line.seq <= last.seq:
                events.gaps.append(Gap(last.at, None, "the server's numbers began anew: another process"))
            last = line
            segment.append(line)
        elif isinstance(line, EventFault):
            events.gaps.append(Gap(line.at, None, line.fault))
        else:
            events.paths[line.session, line.flow, line.turn] = line
    if events is not None:
        events.batches += _on_one_clock(segment)
    return events


def _on_one_clock(batches: list[EventBatch]) -> list[EventBatch]:
    offset = min((batch.at - batch.ts for batch in batches), default=0.0)
    return [batch.model_copy(update={"at": batch.ts + offset}) for batch in batches]


def _whole_lines(file: Path) -> Iterator[bytes | None]:
    with file.open("rb") as stream:
        for line in stream:
            yield line if line.endswith(b"\n") else None


def _parsed(raw: bytes, where: str) -> EventHeader | EventBatch | RequestPages | EventFault:
    try:
        value = orjson.loads(raw)
        if "header" in value:
            return EventHeader.model_validate(value)
        if "fault" in value:
            return EventFault.model_validate(value)
        if "seq" in value:
            return EventBatch.model_validate(value)
        return RequestPages.model_validate(value)
    except (orjson.JSONDecodeError, TypeError, ValidationError) as error:
        fault = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            fault = f"field {'.'.join(map(str, first['loc']))!r}: {first['msg']}"
        raise EventError(
            f"{where}: {fault}; the file was damaged after it was written; remove {KV_EVENTS} to report without events"
        ) from error
