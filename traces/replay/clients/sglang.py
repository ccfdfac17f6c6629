"""SGLang's own ``POST /generate``, streamed: token ids in, token ids out (SGLang 0.5.23).

What the server does with what is sent, from ``managers/tokenizer_manager.py`` and ``managers/scheduler.py``:

- ``meta_info`` of every chunk carries ``prompt_tokens``, ``completion_tokens`` and ``cached_tokens``;
  ``cached_tokens_details`` is None when nothing was cached, else ``{device, host[, storage]}``.
- ``output_ids`` of a chunk are all tokens so far, or only the new ones under
  ``--incremental-streaming-output``; the two are told apart by ``completion_tokens``.
- ``max_new_tokens`` of 0 is accepted but makes the request prefill-only, which takes other code paths in the
  scheduler. The replay sends at least 1; one output token leaves no KV behind, so no prefix length changes.
- It silently clips the output when prompt plus output do not fit: see ``usable_context``.

A server with agentserve's policies is also sent ``session_id``, the stop reason in ``custom_params``, and
``/close_session`` when a conversation ends; any other server is sent none of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson

from traces.replay.clients.base import (
    FACTS,
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
from traces.replay.record import OffloadAnswer, RequestError, ServerInfo
from traces.replay.speculation import speculation_of

_GRAPHS = "cuda_graph_config"  # the one argument with levels that an audit of the run needs
_SECRETS = ("api_key", "password", "keyfile", "secret")


class SGLangClient:
    """A ``Client`` of an SGLang server that takes and gives token ids."""

    exact_prompt = True
    exact_output = True
    uses_messages = False

    def __init__(self, base_url: str, *, timeout_s: float = 600.0, api_key: str | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._http = http_client(self._base_url, timeout_s=timeout_s, api_key=api_key)
        self._model_path: str | None = None
        self.names_sessions = False

    async def info(self) -> ServerInfo:
        server = await self._get_json("/server_info")
        model = await self._get_json("/model_info")
        models = await self._get_json("/v1/models")
        self._model_path = model.get("model_path")
        self.names_sessions = server.get("radix_cache_backend") == POLICY_BACKEND
        cards = models.get("data") or [{}]
        return ServerInfo(
            base_url=self._base_url,
            client="sglang",
            engine_version=server.get("version"),
            model=model.get("served_model_name") or self._model_path,
            page_size=server.get("page_size"),
            context_length=cards[0].get("max_model_len") or server.get("context_length"),
            kv_capacity_tokens=server.get("max_total_num_tokens"),
            names_sessions=self.names_sessions,
            speculation=speculation_of(server, await self.metrics() if server.get("speculative_algorithm") else ""),
            args=_plain_args(server),
        )

    async def vocabulary(self) -> tuple[int, int] | None:
        """From the checkpoint's ``config.json`` where its path is readable here.

        The ends of a vocabulary hold special tokens (images, tools, turns), so the ids come from its middle.
        """
        size = _vocab_size(self._model_path)
        return None if size is None else (size // 8, max(size // 8 + 2, size * 3 // 4))

    async def alive(self) -> bool:
        # Not /health: that one runs a request through the scheduler and takes a second or more.
        return await probe(self._http, "/model_info")

    async def flush_cache(self) -> None:
        try:
            response = await self._http.post("/flush_cache", params={"timeout": 30}, timeout=60.0)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(f"{self._base_url}/flush_cache: {as_request_error(error).message}") from error
        if response.status_code != 200:
            raise ServerUnreachableError(
                f"{self._base_url} did not flush its cache ({response.status_code}: {response.text.strip()[:200]}); "
                "wait until no request runs there, or replay with --no-flush-cache"
            )

    async def generate(self, call: Call, on_first_token: Callable[[], None]) -> Outcome:
        outcome = Outcome()
        sampling: dict[str, Any] = {"max_new_tokens": call.max_tokens, "ignore_eos": True, "temperature": 0.0}
        fields: dict[str, Any] = {"input_ids": call.prompt, "stream": True, "sampling_params": sampling}
        if self.names_sessions:
            fields["session_id"] = call.conversation
            sampling |= stop_parameters(call)
        body = orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
        ids: list[int] = []

        def take(data: str) -> RequestError | None:
            had_tokens = bool(ids)
            error = _take_chunk(data, outcome, ids)
            if ids and not had_tokens:
                on_first_token()
            return error

        outcome.error = await stream_events(self._http, "/generate", body, take)
        outcome.output_ids = np.asarray(ids, dtype=np.int32)
        outcome.output_tokens = len(ids)
        if outcome.error is None and outcome.finish_reason is None:
            outcome.error = unfinished()
        return outcome

    async def end(self, name: str) -> str | None:
        return await end_conversation(self._http, name)

    async def aclose(self) -> None:
        await self._http.aclose()

    async def metrics(self) -> str:
        try:
            response = await self._http.get("/metrics", timeout=10.0)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == 200 else ""

    async def _get_json(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(path, timeout=10.0)
        except httpx.HTTPError as error:
            raise ServerUnreachableError(
                f"no server answers at {self._base_url}{path} ({as_request_error(error).message}); start one with "
                "`agentserve launch`, or give its address with --url"
            ) from error
        if response.status_code != 200:
            raise ServerUnreachableError(
                f"{self._base_url}{path} answered {response.status_code}: this is no SGLang server, or it is not "
                "ready yet; for another OpenAI-compatible server use --client openai"
            )
        try:
            parsed = orjson.loads(response.content)
        except orjson.JSONDecodeError as error:
            raise ServerUnreachableError(f"{self._base_url}{path} did not answer with JSON: {error}") from error
        if not isinstance(parsed, dict):
            raise ServerUnreachableError(f"{self._base_url}{path} answered {type(parsed).__name__}, not an object")
        return parsed


def _take_chunk(data: str, outcome: Outcome, ids: list[int]) -> RequestError | None:
    """Fold one event of the stream into the outcome."""
    try:
        chunk = orjson.loads(data)
        if "error" in chunk:
            return RequestError(kind="http", message=str(chunk["error"].get("message", chunk["error"]))[:500])
        meta = chunk["meta_info"]
        new: list[int] = chunk.get("output_ids") or []
        completed = int(meta["completion_tokens"])
        if len(new) == completed:
            ids[:] = new
        else:
            ids.extend(new)
        outcome.prompt_tokens = int(meta["prompt_tokens"])
        outcome.cached_tokens = meta.get("cached_tokens")
        queued = meta.get("queue_time")  # servers with metrics say it (srt/observability/req_time_stats.py, 0.5.23)
        outcome.queued_s = None if queued is None else max(0.0, float(queued))
        outcome.accepted_drafts = meta.get("spec_correct_drafts_histogram")
        details = meta.get("cached_tokens_details") or {}
        for facts in meta.get(FACTS) or ():
            outcome.held_s = facts.get("held_s")
            answer = {name: facts[name] for name in OffloadAnswer.model_fields if name in facts}
            outcome.offload = OffloadAnswer.model_validate(answer) if answer else None
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        return RequestError(kind="protocol", message=f"unreadable event {data[:200]!r}: {error!r}")
    if details:
        outcome.cached_device = details.get("device")
        outcome.cached_host = details.get("host")
        outcome.cached_storage = details.get("storage")
    reason = meta.get("finish_reason")
    if isinstance(reason, dict):
        outcome.finish_reason = str(reason.get("type", "unknown"))
        if outcome.finish_reason == "abort":
            return RequestError(kind="http", message=f"aborted by the server: {reason.get('message', '')}"[:500])
    return None


def usable_context(info: ServerInfo) -> int | None:
    """Largest prompt plus output, in tokens, that this server takes without refusing or clipping.

    SGLang 0.5.23 refuses a prompt of ``min(context, capacity) - 6`` tokens and clips an output to what is left
    less two; against the capacity it also reserves one page and rounds the prompt up to pages. One bound is
    used for both, at most five tokens lower than needed. None where the server told neither.
    """
    bounds = []
    if info.context_length is not None:
        bounds.append(info.context_length - 7)
    if info.kv_capacity_tokens is not None:
        bounds.append(info.kv_capacity_tokens - 2 * (info.page_size or 1) - 7)
    return min(bounds, default=None)


def _plain_args(server: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in sorted(server.items())
        if (isinstance(value, str | int | float) or name == _GRAPHS)
        and not any(word in name for word in _SECRETS)
        and not (name == "launch_command" and any(word.replace("_", "-") in str(value) for word in _SECRETS))
    }


def _vocab_size(model_path: str | None) -> int | None:
    if model_path is None:
        return None
    try:
        config = json.loads((Path(model_path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return size if isinstance(size, int) and size > 16 else None
