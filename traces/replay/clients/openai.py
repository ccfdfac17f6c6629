"""Any OpenAI-compatible server: ``POST /v1/chat/completions``, streamed, with usage in the last chunk.

Prompt lengths are the server's (see ``chat``); a record's prefix lengths stay in recorded tokens. Cached
tokens are those of ``usage.prompt_tokens_details``; a server that leaves them out gives records without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import orjson

from traces.replay.clients.base import (
    POLICY_BACKEND,
    Call,
    Outcome,
    ServerUnreachableError,
    as_request_error,
    end_conversation,
    http_client,
    probe,
    stop_parameters,
    stream_events,
    unfinished,
)
from traces.replay.clients.chat import VOCABULARY
from traces.replay.record import RequestError, ServerInfo


class OpenAIClient:
    """A ``Client`` of any OpenAI-compatible server: prompts are words, near the recorded lengths."""

    exact_prompt = False
    uses_messages = True

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        ignore_eos: bool = True,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        """``ignore_eos`` is an extension of SGLang and vLLM; servers that know only OpenAI's fields refuse it."""
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self.exact_output = ignore_eos
        self.names_sessions = False
        self._http = http_client(self._base_url, timeout_s=timeout_s, api_key=api_key)

    async def info(self) -> ServerInfo:
        try:
            response = await self._http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(
                f"no server answers at {self._base_url}/v1/models ({as_request_error(error).message}); give its "
                "address with --url"
            ) from error
        if response.status_code != 200:
            raise ServerUnreachableError(
                f"{self._base_url}/v1/models answered {response.status_code}: {response.text[:200]!r}; check --url "
                "and the key in AGENTSERVE_API_KEY"
            )
        try:
            cards: list[dict[str, Any]] = orjson.loads(response.content)["data"]
            names = [str(card["id"]) for card in cards]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise ServerUnreachableError(f"{self._base_url}/v1/models did not answer with a list of models") from error
        if self._model is None and not names:
            raise ServerUnreachableError(f"{self._base_url} lists no model; name one with --model")
        if self._model is not None and names and self._model not in names:
            raise ServerUnreachableError(
                f"{self._base_url} does not serve {self._model!r}; --model can be {', '.join(names[:10])}"
            )
        self._model = self._model or names[0]
        card = next((card for card in cards if card["id"] == self._model), {})
        self.names_sessions = await self._has_policies()
        return ServerInfo(
            base_url=self._base_url,
            client="openai",
            model=self._model,
            context_length=card.get("max_model_len"),
            names_sessions=self.names_sessions,
        )

    async def _has_policies(self) -> bool:
        """Only SGLang has this address; what answers otherwise is not asked again and sent nothing."""
        try:
            response = await self._http.get("/server_info", timeout=10.0)
            server = orjson.loads(response.content) if response.status_code == 200 else None
        except (httpx.HTTPError, orjson.JSONDecodeError):
            return False
        return isinstance(server, dict) and server.get("radix_cache_backend") == POLICY_BACKEND

    async def metrics(self) -> str:
        return ""  # what another server counts is in no form that is known here

    async def vocabulary(self) -> tuple[int, int] | None:
        return VOCABULARY

    async def alive(self) -> bool:
        return await probe(self._http, "/v1/models")

    async def flush_cache(self) -> None:
        raise ServerUnreachableError(
            "the OpenAI protocol has no request to empty a cache; start the server afresh, or leave out --flush-cache"
        )

    async def generate(self, call: Call, on_first_token: Callable[[], None]) -> Outcome:
        outcome = Outcome()
        body: dict[str, Any] = {
            "model": self._model,
            "messages": call.messages,
            "max_tokens": call.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact_output:
            body["ignore_eos"] = True
        if self.names_sessions:
            body["session_id"] = call.conversation
            body |= stop_parameters(call)
        texts: list[str] = []

        def take(data: str) -> RequestError | None:
            had_text = bool(texts)
            error = _take_chunk(data, outcome, texts)
            if texts and not had_text:
                on_first_token()
            return error

        outcome.error = await stream_events(self._http, "/v1/chat/completions", orjson.dumps(body), take)
        outcome.output_text = "".join(texts)
        if outcome.error is None and outcome.finish_reason is None:
            outcome.error = unfinished()
        elif outcome.error is None and outcome.prompt_tokens is None:
            outcome.error = RequestError(
                kind="protocol",
                message="no usage in the stream; the server must honour stream_options.include_usage",
            )
        return outcome

    async def end(self, name: str) -> str | None:
        return await end_conversation(self._http, name)

    async def aclose(self) -> None:
        await self._http.aclose()


def _take_chunk(data: str, outcome: Outcome, texts: list[str]) -> RequestError | None:
    """Fold one event of the stream into the outcome."""
    try:
        chunk = orjson.loads(data)
        if chunk.get("error"):
            return RequestError(kind="http", message=str(chunk["error"])[:500])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # Reasoning is generated like any other token; which field carries it depends on the server.
            piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if piece:
                texts.append(piece)
            if choice.get("finish_reason"):
                outcome.finish_reason = str(choice["finish_reason"])
        usage = chunk.get("usage")
        if usage:
            outcome.prompt_tokens = int(usage["prompt_tokens"])
            outcome.output_tokens = int(usage["completion_tokens"])
            details = usage.get("prompt_tokens_details") or {}
            outcome.cached_tokens = details.get("cached_tokens")
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        return RequestError(kind="protocol", message=f"unreadable event {data[:200]!r}: {error!r}")
    return None
