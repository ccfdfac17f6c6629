"""Adds the watch page to SGLang's HTTP server. Checked against sglang 0.5.23.

Routes of ours, nothing of SGLang's changed: the page (no data in it), its data, and two actions. Data is open to whom
the server's other endpoints are (``--api-key``). Actions want the admin key, and are refused where the server has none.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

# Here and not where they are used: FastAPI looks up annotations of routes in the module.
from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse

from agentserve.audit.counters import Metrics, Sample
from agentserve.runtime.policy_settings import settings_from
from agentserve.watch.page import HTML
from agentserve.watch.points import Ring, point_of
from agentserve.watch.settings import OPEN_PAGE, PAGE
from agentserve.watch.snapshot import snapshot
from agentserve.watch.state import read_states

SAMPLE_EVERY_S = 5.0


class Observer:
    """Reads the counters that SGLang's processes share, now and then and when asked.

    Args:
        registry: of ``prometheus_client``, with SGLang's multiprocess collector.
        folder: in which the processes share them.
    """

    def __init__(self, registry: Any, folder: str) -> None:
        self._registry = registry
        self._folder = folder
        self._ring = Ring(apart=SAMPLE_EVERY_S * 0.8)
        self._lock = threading.Lock()

    def run(self) -> None:
        """Sample for as long as the process lives."""
        while True:
            self.sample()
            time.sleep(SAMPLE_EVERY_S)

    def sample(self) -> None:
        samples = [
            Sample(s.name, tuple(sorted(s.labels.items())), s.value)
            for family in self._registry.collect()
            for s in family.samples
            if not s.name.endswith("_bucket")
        ]
        with self._lock:
            self._ring.add(point_of(Metrics(samples), time.monotonic()))

    def snapshot(self, server: dict[str, Any]) -> dict[str, Any]:
        self.sample()
        with self._lock:
            return snapshot(self._ring, read_states(Path(self._folder)), server, time.time())


def add_page(result: Any, app: Any) -> None:
    """AFTER ``add_prometheus_middleware(app)``, which SGLang calls where metrics are on."""
    from prometheus_client import CollectorRegistry, multiprocess

    if any(getattr(route, "path", None) == PAGE for route in app.routes):
        return
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    observer = Observer(registry, os.environ["PROMETHEUS_MULTIPROC_DIR"])
    threading.Thread(target=observer.run, name="agentserve-watch", daemon=True).start()
    _add_routes(app, observer)


def _add_routes(app: Any, observer: Observer) -> None:
    from sglang.srt.utils.auth import AuthLevel, auth_level
    from starlette.concurrency import run_in_threadpool

    async def page() -> HTMLResponse:
        return HTMLResponse(HTML, headers={"Cache-Control": "no-store"})

    async def data() -> JSONResponse:
        return JSONResponse(await run_in_threadpool(observer.snapshot, _server()))

    async def act(action: str, request: Request) -> JSONResponse:
        refused = _refusal(request.headers.get("Authorization"), request.url.path)
        if refused is not None:
            return refused
        return await _act(action, request)

    auth_level(AuthLevel.ADMIN_FORCE)(act)
    app.add_api_route(PAGE, page, methods=["GET"], include_in_schema=False)
    app.add_api_route(OPEN_PAGE, page, methods=["GET"], include_in_schema=False)
    app.router.routes.insert(0, app.router.routes.pop())  # before SGLang's mount of all that begins with /metrics
    app.add_api_route(f"{PAGE}.json", data, methods=["GET"], include_in_schema=False)
    app.add_api_route(f"{PAGE}/{{action}}", act, methods=["POST"], include_in_schema=False)


def _refusal(authorization: str | None, path: str) -> JSONResponse | None:
    """An answer to whoever may not act; None for the holder of the admin key."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.auth import AuthLevel, decide_request_auth

    decision = decide_request_auth(
        method="POST",
        path=path,
        authorization_header=authorization,
        api_key=get_serving().api_key,
        admin_api_key=get_serving().admin_api_key,
        auth_level=AuthLevel.ADMIN_FORCE,
    )
    if decision.allowed:
        return None
    if decision.error_status_code == 403:
        return JSONResponse({"error": "read-only: start the server with --admin-api-key to act from here"}, 403)
    return JSONResponse({"error": "the admin key is missing or wrong"}, 401)


async def _act(action: str, request: Request) -> JSONResponse:
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    manager = get_global_state().tokenizer_manager
    if action == "flush":
        done = await manager.flush_cache()
        return JSONResponse({"done": bool(done.success)}, 200 if done.success else 409)
    if action == "close":
        name = request.query_params.get("session", "")
        if not name:
            return JSONResponse({"error": "name the session: ?session=ID"}, 400)
        await manager.close_session(CloseSessionReqInput(session_id=name), request)
        return JSONResponse({"done": True})
    return JSONResponse({"error": "no such action; there are flush and close"}, 404)


def _server() -> dict[str, Any]:
    """Facts that do not change while the server runs."""
    from sglang.srt.runtime_context import get_server_args, get_serving

    args, settings = get_server_args(), settings_from()
    return {
        "model": args.served_model_name,
        "page_size": args.page_size,
        "tp": args.tp_size,
        "policy": settings.eviction if settings else None,
        "admission": settings.admission if settings else None,
        "sglang_policy": args.radix_eviction_policy,
        "radix_cache": not args.disable_radix_cache,
        "can_act": bool(get_serving().admin_api_key),
    }
