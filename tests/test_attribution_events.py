"""Cache events: pages as numbers, the recorder on a real ZMQ socket, the file and its faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_report_summary import record
from traces.replay.events import KV_EVENTS, EventError, PageBook, as_ranges, endpoint_of, operations, read_events
from traces.replay.events_zmq import EventRecorder, recorder_for, unpacked
from traces.replay.record import ServerInfo

PAGE = 4


def stored(hashes: list[int], tokens: list[Any], parent: int | None = None, medium: str = "GPU") -> dict[str, Any]:
    """As SGLang 0.5.23 encodes ``BlockStored`` (disaggregation/kv_events.py)."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": PAGE,
        "lora_id": None,
        "medium": medium,
    }


def removed(*hashes: int, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def tokens(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def pairs(ids: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(ids))


def server(**changes: Any) -> ServerInfo:
    return ServerInfo(**{"base_url": "http://127.0.0.1:1", "client": "sglang", "page_size": PAGE, **changes})


def test_prompts_and_events_meet_in_page_numbers() -> None:
    book = PageBook(PAGE)
    ops = operations(
        [stored([7, 8], list(range(8))), stored([9], [8, 9, 10, 99], parent=8), removed(9, 8), removed(5)], book
    )
    assert ops == [["store", 1, [(0, 2)]], ["store", 1, [(2, 1)]], ["remove", 1, [(2, 1), (1, 1)]], ["remove", 1, []]]
    assert book.path(tokens(*range(11))) == [(0, 2)]  # the last page is not full
    assert book.path(tokens(0, 1, 2, 3, 4, 5, 6, 0)) == [(0, 1), (3, 1)]  # the same beginning
    assert book.path(tokens(4, 5, 6, 7)) == [(4, 1)]  # the same tokens elsewhere are another page
    assert (book.unknown_removed, len(book)) == (1, 5)


def test_pairs_of_eagle() -> None:
    """A page of 4 pairs spans 5 tokens: 9 tokens have two pages, 8 have one."""
    book = PageBook(PAGE, pair_keys=True)
    ids = list(range(9))
    assert operations([stored([1, 2], pairs(ids))], book) == [["store", 1, [(0, 2)]]]
    assert book.path(tokens(*ids)) == [(0, 2)]
    assert book.path(tokens(*ids[:8])) == [(0, 1)]
    assert (book.pages_of(9), book.pages_of(8), book.pages_of(0)) == (2, 1, 0)
    with pytest.raises(EventError, match="pages of 4 pairs"):
        operations([stored([3], [1, 2, 3, 4])], book)


def test_blocks_below_an_unknown_parent_are_pages_of_their_own() -> None:
    book = PageBook(PAGE)
    operations([stored([3], [0, 1, 2, 3], parent=77)], book)
    assert book.unknown_parents == 1
    assert book.path(tokens(0, 1, 2, 3)) == [(1, 1)]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved"},
        7,
        stored([1], [1, 2, 3]),
        stored([1], [1, 2, 3, "x"]),
        stored([1], [1, 2, 3, 4], medium="TAPE"),
        {"type": "BlockStored"},
        {**stored([1], [1, 2, 3, 4]), "block_size": 8},
    ],
)
def test_events_that_are_none(event: Any) -> None:
    with pytest.raises(EventError):
        operations([event], PageBook(PAGE))


@given(st.binary(max_size=40), st.integers(0, 4))
@settings(max_examples=300)
def test_any_bytes_give_clean_errors(raw: bytes, frames: int) -> None:
    """Messages of anybody on the port: refused by name, never a crash."""
    with contextlib.suppress(EventError):
        _, _, events = unpacked([b"kv", (1).to_bytes(8, "big"), raw][:frames] or [raw])
        operations(events, PageBook(PAGE))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv"}', "tcp://10.0.0.7:5557"),
        ('{"publisher":"zmq","endpoint":"tcp://0.0.0.0:5557"}', "tcp://10.0.0.7:5557"),
        ('{"publisher":"zmq","endpoint":"tcp://10.1.1.1:9"}', "tcp://10.1.1.1:9"),
        ('{"publisher":"zmq"}', "tcp://10.0.0.7:5557"),
        ('{"publisher":"null"}', None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_where_a_server_publishes(config: str | None, expected: str | None) -> None:
    args = {} if config is None else {"kv_events_config": config}
    assert endpoint_of(server(base_url="http://10.0.0.7:30000", args=args)) == expected


class Publisher:
    """SGLang's side: a PUB socket that numbers its batches."""

    def __init__(self) -> None:
        self.socket = zmq.Context.instance().socket(zmq.PUB)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.sequence = 0

    def send(self, *events: dict[str, Any], ts: float | None = None) -> None:
        batch = msgspec.msgpack.encode([time.time() if ts is None else ts, list(events), None])
        self.socket.send_multipart((b"kv", self.sequence.to_bytes(8, "big"), batch))
        self.sequence += 1


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.socket.close(linger=0)


def recording(publisher: Publisher, run: Path) -> EventRecorder:
    """A recorder that is known to hear the publisher."""
    recorder = recorder_for(f"tcp://127.0.0.1:{publisher.port}", server())
    assert recorder is not None

    async def flush() -> None:
        publisher.send({"type": "AllBlocksCleared"})

    assert asyncio.run(recorder.sees_flush(flush))
    started = time.monotonic()
    recorder.begin(run, lambda: time.monotonic() - started, emptied=True)
    return recorder


def test_recorder_writes_events_and_paths_on_one_clock(publisher: Publisher, tmp_path: Path) -> None:
    recorder = recording(publisher, tmp_path)
    publisher.send(stored([1, 2], list(range(8))))
    publisher.send(removed(2))
    recorder.request(record("a", 0, 10), tokens(*range(10)), tokens(10, 11, 12))
    recorder.close()
    events = read_events(tmp_path)
    assert events is not None
    assert events.header.emptied
    assert events.gaps == []
    assert [op for batch in events.batches[-2:] for op in batch.ops] == [
        ("store", 1, ((0, 2),)),
        ("remove", 1, ((1, 1),)),
    ]
    path = events.paths["a", "main", 0]
    assert path.prompt == ((0, 2),)
    assert path.answer == ((2, 1),)  # 10 + 2 computed tokens fill a third page
    assert -2 < events.batches[-1].at < 2


def test_lost_batches_are_seen(publisher: Publisher, tmp_path: Path) -> None:
    recorder = recording(publisher, tmp_path)
    publisher.send(stored([1], [0, 1, 2, 3]))
    publisher.sequence += 5
    publisher.send(removed(1))
    publisher.sequence = 0  # the server started again
    publisher.send(stored([1], [0, 1, 2, 3]))
    recorder.close()
    events = read_events(tmp_path)
    assert events is not None
    assert [gap.batches for gap in events.gaps] == [5, None]


def test_an_unreadable_event_ends_the_evidence_and_says_so(publisher: Publisher, tmp_path: Path) -> None:
    recorder = recording(publisher, tmp_path)
    publisher.send({"type": "Novelty"})
    publisher.send(stored([1], [0, 1, 2, 3]))
    assert "Novelty" in recorder.close()
    events = read_events(tmp_path)
    assert events is not None
    assert "Novelty" in events.gaps[-1].why
    assert all(op[0] == "clear" for batch in events.batches for op in batch.ops)


def test_recorder_options() -> None:
    config = '{"publisher":"zmq","endpoint":"tcp://*:5557"}'
    assert recorder_for("auto", server()) is None
    assert recorder_for("none", server(args={"kv_events_config": config})) is None
    assert recorder_for("auto", server(client="openai", args={"kv_events_config": config})) is None
    with pytest.raises(EventError, match="page size"):
        recorder_for("tcp://127.0.0.1:1", server(page_size=None))
    with pytest.raises(EventError, match="tcp://127"):
        recorder_for("nowhere", server())


HEADER = {"header": 1, "endpoint": "tcp://x:1", "page_size": PAGE, "pair_keys": False, "emptied": True}
BATCH = {"seq": 3, "ts": 100.0, "at": 5.0, "ops": [["store", 1, [[0, 2]]], ["clear"]]}


def write(folder: Path, *lines: Any, tail: bytes = b"") -> Path:
    (folder / KV_EVENTS).write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines) + tail)
    return folder


def test_server_times_are_moved_by_the_smallest_delay(tmp_path: Path) -> None:
    slow = {**BATCH, "seq": 4, "ts": 101.0, "at": 9.0}
    events = read_events(write(tmp_path, HEADER, BATCH, slow, tail=b'{"seq": 5'))
    assert events is not None
    assert [batch.at for batch in events.batches] == [5.0, 6.0]
    assert events.cut_lines == 1


def test_a_resumed_run_has_another_offset(tmp_path: Path) -> None:
    later = {**BATCH, "seq": 9, "ts": 500.0, "at": 6.0}
    events = read_events(write(tmp_path, HEADER, BATCH, HEADER, later))
    assert events is not None
    assert [batch.at for batch in events.batches] == [5.0, 6.0]
    assert [gap.batches for gap in events.gaps] == [5]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([BATCH], "does not begin with its header"),
        ([HEADER, {**BATCH, "ops": [["steal", 1, []]]}], "line 2: field .ops"),
        ([HEADER, {"session": "a"}], "line 2: field 'flow'"),
        ([HEADER, [1]], "line 2"),
        ([HEADER, {**HEADER, "page_size": 8}], "pages changed"),
    ],
)
def test_damaged_files_are_refused_by_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(EventError, match=message):
        read_events(write(tmp_path, *lines))


def test_no_file_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path) is None
    assert as_ranges([]) == []
