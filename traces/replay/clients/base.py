"""What the replay needs from a server, whatever its protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

import httpx
import numpy as np
import numpy.typing as npt

from traces.replay.record import OffloadAnswer, RequestError, ServerInfo

Tokens = npt.NDArray[np.int32]
Message = dict[str, str]

# What SGLang's /server_info calls the cache backend of ``agentserve launch --policy``, and the parameter that tells it
# why an answer ends. Only a server with that backend is sent either of them.
POLICY_BACKEND = "agentserve"
STOP_PARAMETER = "agentserve_stop"
# Where an agentserve server's answers say in ``meta_info`` what else is known of the request
# (``agentserve.runtime.request_facts``).
FACTS = "agentserve"


class ServerUnreachableError(RuntimeError):
    """No usable server at the address. The message says what was tried and what to do."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as built.

    Attributes:
        prompt: token ids, int32, shape (prompt_tokens,).
        max_tokens: tokens to generate (>= 1).
        messages: the same prompt as chat messages; only the OpenAI client reads them.
        conversation: ``SESSION/FLOW``, see ``conversation_name``; sent to servers whose policies know sessions.
        stop: why the recorded answer ended: ``tool_use``, ``end_turn`` or nothing; sent to the same servers.
    """

    prompt: Tokens
    max_tokens: int
    messages: tuple[Message, ...] = ()
    conversation: str = ""
    stop: str = ""


@dataclass(slots=True)
class Outcome:
    """What came back. With ``error`` set, the other fields hold what was known when it happened."""

    prompt_tokens: int | None = None  # as counted by the server
    output_tokens: int = 0
    output_ids: Tokens | None = None  # None where the protocol does not carry token ids
    output_text: str | None = None  # only where there are no token ids
    cached_tokens: int | None = None
    cached_device: int | None = None
    cached_host: int | None = None
    cached_storage: int | None = None
    accepted_drafts: list[int] | None = None  # verification steps by accepted drafts; None where nothing was drafted
    offload: OffloadAnswer | None = None  # as in the record
    held_s: float | None = None
    queued_s: float | None = None
    finish_reason: str | None = None
    error: RequestError | None = None


class Client(Protocol):
    """A connection to one server. All methods run on one event loop."""

    #: True when the server must count exactly ``len(prompt)`` prompt tokens.
    exact_prompt: bool
    #: True when the server was told to go on past its end token, so that output length is as wanted.
    exact_output: bool
    #: True when the call's ``messages`` are sent instead of its ``prompt``.
    uses_messages: bool
    #: True when the server has agentserve's policies and is told conversations and stop reasons; ``info`` finds out.
    names_sessions: bool

    async def info(self) -> ServerInfo:
        """Ask the server about itself.

        Raises:
            ServerUnreachableError: nothing answers, or what answers is no such server.
        """

    async def metrics(self) -> str:
        """The server's counters in the Prometheus text format; empty where it tells none."""
        ...

    async def vocabulary(self) -> tuple[int, int] | None:
        """Half-open range of ordinary token ids to build prompts from; None where it cannot be known."""

    async def alive(self) -> bool:
        """One short probe (2 s at most) that never raises."""

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache.

        Raises:
            ServerUnreachableError: the server refused or has no such request.
        """

    async def generate(self, call: Call, on_first_token: Callable[[], None]) -> Outcome:
        """Send the call and read its stream to the end.

        Calls ``on_first_token`` once, when the first generated token arrives. Failures are returned in
        ``Outcome.error``, never raised; a cancelled call closes its connection, which aborts it at the server.
        """

    async def end(self, name: str) -> str | None:
        """Tell the server that a session or one flow of it is over; returns what went wrong, if anything did.

        Only for servers with ``names_sessions``.
        """

    async def aclose(self) -> None: ...


def conversation_name(session: str, flow: str | None = None) -> str:
    """``SESSION`` or ``SESSION/FLOW`` as the policies read it: the first slash parts them, so the session has none."""
    name = quote(session, safe=" :@")
    return name if flow is None else f"{name}/{flow}"


def stop_parameters(call: Call) -> dict[str, Any]:
    """Where SGLang takes free parameters: the stop reason, if the trace has one."""
    return {"custom_params": {STOP_PARAMETER: call.stop}} if call.stop else {}


async def end_conversation(http: httpx.AsyncClient, name: str) -> str | None:
    """``POST /close_session``; returns what went wrong, if anything did."""
    try:
        response = await http.post("/close_session", json={"session_id": name}, timeout=10.0)
    except httpx.HTTPError as error:
        return as_request_error(error).message
    return None if response.status_code == 200 else f"{response.status_code}: {response.text[:200]}"


def http_client(base_url: str, *, timeout_s: float, api_key: str | None) -> httpx.AsyncClient:
    """The one place where timeouts and connection limits are set.

    Args:
        timeout_s: longest silence on an open request, in seconds; a queued request is silent until it starts.
        api_key: sent as a bearer token; never written to the run.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        timeout=httpx.Timeout(timeout_s, connect=10.0),
        # The engine bounds concurrency; a pool limit below it would queue requests unseen and spoil TTFT.
        # Servers close idle connections after 5 s; to reuse one at that moment would fail a request for nothing.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=1.0),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        trust_env=False,  # a proxy from the environment would sit between us and a local server
    )


def as_request_error(error: httpx.HTTPError) -> RequestError:
    """Name a transport failure. A request that could not be sent at all is also a connection error."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return RequestError(kind="timeout", message=text)
    return RequestError(kind="connection", message=text)


async def stream_events(
    http: httpx.AsyncClient, path: str, body: bytes, take: Callable[[str], RequestError | None]
) -> RequestError | None:
    """POST a JSON body and hand the data of each server-sent event to ``take``, in order.

    Returns:
        None when the stream ended, else what went wrong: the first error that ``take`` returned, an HTTP status, or
        the transport's failure. Nothing is read after an error.
    """
    headers = {"Content-Type": "application/json"}
    try:
        async with http.stream("POST", path, content=body, headers=headers) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                return RequestError(kind="http", message=f"{response.status_code}: {text[:500]}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                fault = take(line[5:])
                if fault is not None:
                    return fault
    except httpx.HTTPError as error:
        return as_request_error(error)
    return None


def unfinished() -> RequestError:
    """A stream that ended as if it were whole, but never said why."""
    return RequestError(kind="protocol", message="the stream ended without a finish reason")


async def probe(http: httpx.AsyncClient, path: str) -> bool:
    """Whether anything answers within 2 s but a server error."""
    try:
        response = await http.get(path, timeout=2.0)
    except httpx.HTTPError:
        return False
    return response.status_code < 500
