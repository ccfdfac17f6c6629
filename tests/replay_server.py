"""A stand-in for a server: SGLang's answers over an infinite cache of whole pages, with faults on demand.

It is there for what a real server will not do when asked: die, stall, miscount. It answers ``/generate``
(and chat completions) over real HTTP with the shapes of SGLang 0.5.23, and inserts a prompt when it arrives.
Run as ``python -m tests.replay_server PORT [--faults JSON]`` it is a process of its own that can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import threading
import time
import uuid
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from radix_cache.prefix_index import TokenPrefixIndex
from radix_cache.rates import hit_tokens


@dataclass
class Faults:
    """Which of the server's requests (numbered from 1 in order of arrival) go wrong."""

    die_at: int = 0  # the process ends while this request streams
    miscount_at: list[int] = field(default_factory=list)  # prompt length reported wrongly
    short_at: list[int] = field(default_factory=list)  # one token too few
    refuse_at: list[int] = field(default_factory=list)  # status 500
    drop_at: list[int] = field(default_factory=list)  # connection closed in the middle of the stream
    stall_at: list[int] = field(default_factory=list)  # no byte for a minute
    unhealthy: bool = False  # probes fail
    busy: bool = False  # the cache cannot be flushed


@dataclass
class ReplayServer:
    """The state behind the routes; ``seen`` holds what arrived, for assertions."""

    page_size: int = 128
    context_length: int = 1 << 20
    capacity: int = 1 << 24
    token_s: float = 0.0  # seconds per streamed chunk
    incremental: bool = False
    reports_cache: bool = True
    model_path: str = "nowhere/tiny"
    policies: bool = False  # it is a server with agentserve's policies
    faults: Faults = field(default_factory=Faults)
    index: TokenPrefixIndex = field(default_factory=TokenPrefixIndex)
    seen: list[dict[str, Any]] = field(default_factory=list)
    refuses_ends: bool = False
    closed: list[str] = field(default_factory=list)  # sessions and flows that the client said are over
    flushes: int = 0
    aborted: int = 0
    started: float = field(default_factory=time.time)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/server_info", self._server_info),
                Route("/model_info", self._model_info),
                Route("/v1/models", self._models),
                Route("/flush_cache", self._flush, methods=["POST"]),
                Route("/close_session", self._close, methods=["POST"]),
                Route("/generate", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "version": "0.5.23",
                "page_size": self.page_size,
                "max_total_num_tokens": self.capacity,
                "startup_time": self.started,
                "radix_cache_backend": "agentserve" if self.policies else None,
                "api_key": "do-not-store-me",
            }
        )

    async def _model_info(self, request: Request) -> Response:
        if self.faults.unhealthy:
            return PlainTextResponse("starting", status_code=503)
        return JSONResponse({"model_path": self.model_path, "served_model_name": "tiny"})

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "tiny", "max_model_len": self.context_length}]})

    async def _flush(self, request: Request) -> Response:
        if self.faults.busy:
            return PlainTextResponse("Flush cache failed: requests are running.\n", status_code=400)
        self.flushes += 1
        self.index = TokenPrefixIndex()
        return PlainTextResponse("Cache flushed.\n")

    async def _close(self, request: Request) -> Response:
        if not self.policies or self.refuses_ends:
            return PlainTextResponse("no such session", status_code=400)
        self.closed.append((await request.json())["session_id"])
        return PlainTextResponse("")

    def _arrive(self, prompt: np.ndarray) -> int:
        cached = hit_tokens(self.index.longest_prefix(prompt), len(prompt), self.page_size)
        self.index.insert(prompt)
        return cached

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        number = len(self.seen)
        if number in self.faults.refuse_at:
            return JSONResponse({"error": {"message": "out of luck"}}, status_code=500)
        prompt = np.array(body["input_ids"], dtype=np.int32)
        wanted = int(body["sampling_params"]["max_new_tokens"])
        return StreamingResponse(self._stream(number, prompt, wanted), media_type="text/event-stream")

    async def _stream(self, number: int, prompt: np.ndarray, wanted: int) -> AsyncIterator[bytes]:
        cached = self._arrive(prompt)
        if number in self.faults.stall_at:
            await asyncio.sleep(60)
        count = wanted - 1 if number in self.faults.short_at else wanted
        output = answer(prompt, count)
        meta = {
            "id": uuid.uuid4().hex,
            "prompt_tokens": len(prompt) + (number in self.faults.miscount_at),
            "cached_tokens": cached,
            "cached_tokens_details": {"device": cached, "host": 0} if cached else None,
        }
        finished = False
        try:
            for done in range(1, count + 1):
                await asyncio.sleep(self.token_s)
                if number == self.faults.die_at and done == max(1, count // 2):
                    os._exit(9)
                if number in self.faults.drop_at and done == max(1, count // 2):
                    raise RuntimeError("dropped on demand")
                ids = output[done - 1 : done] if self.incremental else output[:done]
                reason = {"type": "length", "length": wanted} if done == count else None
                chunk = {
                    "output_ids": ids.tolist(),
                    "meta_info": meta | {"completion_tokens": done, "finish_reason": reason},
                }
                if done == count:
                    # An output's KV exists when the request has ended, before the client can react to it.
                    self.index.insert(np.concatenate([prompt, output[:-1]]))
                    finished = True
                yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self.aborted += not finished

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        text = " ".join(f"<{m['role']}> {m['content']}" for m in body["messages"]) + " <assistant>"
        prompt = np.array([zlib.crc32(word.encode()) & 0x7FFFFFFF for word in text.split()], dtype=np.int32)
        cached = self._arrive(prompt)
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        if self.reports_cache:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}

        async def stream() -> AsyncIterator[bytes]:
            def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
                return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"

            yield event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
            for k in range(body["max_tokens"]):
                yield event([{"index": 0, "delta": {"content": f" a{(len(prompt) + k) % 97}"}}])
            yield event([{"index": 0, "delta": {}, "finish_reason": "length"}])
            yield event([], usage=usage)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")


def answer(prompt: np.ndarray, count: int) -> np.ndarray:
    """What the server says to a prompt: drawn from the prompt alone, so that runs can be compared."""
    rng = np.random.default_rng(zlib.crc32(prompt.tobytes()))
    return rng.integers(100, 400, size=count, dtype=np.int32)


class InThread:
    """``with InThread(server) as url``: real HTTP on a free port, in this process."""

    def __init__(self, server: ReplayServer) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(server.app(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.005)
        return self.url

    def __exit__(self, *exc: object) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(10)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--faults", default="{}")
    parser.add_argument("--token-s", type=float, default=0.0)
    args = parser.parse_args()
    server = ReplayServer(token_s=args.token_s, faults=Faults(**json.loads(args.faults)))
    uvicorn.run(server.app(), host="127.0.0.1", port=args.port, log_level="critical", lifespan="off")


if __name__ == "__main__":
    main()
