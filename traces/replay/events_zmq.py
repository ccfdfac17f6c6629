"""Listens to SGLang's KV events over ZMQ (0.5.23: frames topic, 8-byte big-endian number, msgpack batch).

One thread per run: receiving, numbering and writing happen beside the replay's event loop and never delay a request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import orjson
import zmq

from traces.replay.events import (
    KV_EVENTS,
    SCHEMA,
    EventError,
    PageBook,
    Ranges,
    Tokens,
    as_ranges,
    endpoint_of,
    operations,
    pair_keys,
)
from traces.replay.record import RequestRecord, ServerInfo

_POLL_MS = 50
_FLUSHES, _FLUSH_S = 3, 1.0
_QUIET_S, _LONGEST_S = 0.3, 3.0  # after the last request: so long nothing came, and never wait longer


def recorder_for(option: str, server: ServerInfo) -> EventRecorder | None:
    """The recorder that ``--events`` asks for; None where there is nothing to record.

    Raises:
        EventError: events were asked for, but this server cannot be recorded.
    """
    if option == "none" or (option == "auto" and (server.client != "sglang" or endpoint_of(server) is None)):
        return None
    if server.client != "sglang" or server.page_size is None:
        raise EventError(
            f"--events {option}: only runs of --client sglang against a server that tells its page size can be matched "
            "with cache events; leave the option out"
        )
    endpoint = endpoint_of(server) if option == "auto" else option
    assert endpoint is not None
    return EventRecorder(endpoint, server)


class EventRecorder:
    """Writes ``RUN/kv_events.jsonl``. Use: construct, flush the cache, ``sees_flush``, ``begin``, ``request``...,
    ``close``.

    Raises:
        EventError: the endpoint is no address.
    """

    def __init__(self, endpoint: str, server: ServerInfo) -> None:
        self.endpoint = endpoint
        self.book = PageBook(server.page_size or 1, pair_keys=pair_keys(server))
        self.fault: str | None = None  # the first event that could not be read
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)  # no limit: a dropped batch would make the rest of the run unsound
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise EventError(f"--events {endpoint}: {error}; give an address such as tcp://127.0.0.1:5557") from error
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, list[bytes]]] = []  # received before ``begin``
        self._file: BinaryIO | None = None
        self._clock: Callable[[], float] = time.monotonic
        self._last = time.monotonic()
        self._batches = 0
        self._closing = threading.Event()
        self._arrived = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="kv-events", daemon=True)
        self._thread.start()

    async def sees_flush(self, flush: Callable[[], Awaitable[None]]) -> bool:
        """Whether the server's word that its cache is empty arrives here; the cache has just been flushed.

        A subscription takes a moment to reach the server, so what it said to the first flush may have come too early.
        """
        for _ in range(_FLUSHES):
            if await asyncio.to_thread(self._arrived.wait, _FLUSH_S):
                return True
            await flush()
        return await asyncio.to_thread(self._arrived.wait, _FLUSH_S)

    def begin(self, run: Path, clock: Callable[[], float], *, emptied: bool) -> None:
        """Start writing; ``clock`` gives the run's seconds."""
        header = {
            "header": SCHEMA,
            "endpoint": self.endpoint,
            "page_size": self.book.page_size,
            "pair_keys": self.book.pair_keys,
            "emptied": emptied,
        }
        with self._lock:
            self._clock = clock
            self._file = (run / KV_EVENTS).open("ab")
            self._file.write(orjson.dumps(header) + b"\n")
            for received, frames in self._waiting:
                self._write(received, frames)
            self._waiting.clear()

    def request(self, record: RequestRecord, prompt: Tokens, output: Tokens | None) -> None:
        """Write down which pages a request's prompt and answer have (int32 of shape (n,) each)."""
        computed = prompt if output is None else np.concatenate((prompt, output[:-1]))
        pages = expand(self.book.path(computed))
        kept = self.book.pages_of(len(prompt))
        line = {
            "session": record.session,
            "flow": record.flow,
            "turn": record.turn,
            "prompt": as_ranges(pages[:kept]),
            "answer": as_ranges(pages[kept:]),
        }
        with self._lock:
            self._line(orjson.dumps(line))

    def close(self) -> str:
        """Wait until the server has nothing more to say, stop, and describe what was recorded in one line."""
        if self._file is not None:
            deadline = time.monotonic() + _LONGEST_S
            while time.monotonic() < min(deadline, self._last + _QUIET_S):
                time.sleep(_POLL_MS / 1000)
        self._closing.set()
        self._thread.join()
        self._socket.close(linger=0)
        if self._file is not None:
            self._file.close()
        text = f"{self._batches} batches of cache events from {self.endpoint}, {len(self.book)} pages"
        return text if self.fault is None else f"{text}; stopped at an unreadable one: {self.fault}"

    def _listen(self) -> None:
        while not self._closing.is_set():
            if not self._socket.poll(_POLL_MS):
                continue
            frames = self._socket.recv_multipart()
            received = time.monotonic()
            with self._lock:
                self._last = received
                if self._file is None:
                    self._waiting.append((received, frames))
                else:
                    self._write(received, frames)
            self._arrived.set()

    def _write(self, received: float, frames: list[bytes]) -> None:
        if self.fault is not None:
            return
        try:
            sequence, ts, events = unpacked(frames)
            ops = operations(events, self.book)
        except EventError as error:
            # Nothing after it can be trusted: the file says so, and no more events are written.
            self.fault = str(error)
            self._line(orjson.dumps({"fault": self.fault, "at": self._clock()}))
            return
        at = self._clock() - (time.monotonic() - received)
        self._batches += 1
        self._line(orjson.dumps({"seq": sequence, "ts": ts, "at": at, "ops": ops}))

    def _line(self, line: bytes) -> None:
        if self._file is None:
            raise RuntimeError("begin() comes before the first request")
        self._file.write(line + b"\n")
        self._file.flush()


def unpacked(frames: list[bytes]) -> tuple[int, float, list[dict[str, Any]]]:
    """(number, server's unix seconds, events) of one message.

    Raises:
        EventError: other frames, or no msgpack batch.
    """
    if len(frames) != 3 or len(frames[1]) != 8:
        raise EventError(f"a message of {len(frames)} frames; expected topic, 8-byte number and batch")
    try:
        batch = msgspec.msgpack.decode(frames[2])
        return int.from_bytes(frames[1], "big"), float(batch[0]), list(batch[1])
    except (msgspec.DecodeError, TypeError, ValueError, IndexError) as error:
        raise EventError(f"no batch of cache events: {error}") from error


def expand(ranges: Ranges) -> list[int]:
    return [number for first, count in ranges for number in range(first, first + count)]
