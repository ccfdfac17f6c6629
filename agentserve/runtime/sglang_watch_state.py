"""A hook on SGLang's scheduler that counts what became of prompts and publishes its sessions. Checked against 0.5.23.

Nothing here is registered unless the server is to be watched. Only the first tensor-parallel rank counts: all do the
same.
"""

from __future__ import annotations

import os
import time
from array import array
from pathlib import Path
from typing import Any

from agentserve.runtime.policy_settings import settings_from
from agentserve.runtime.watch_counters import WatchCounters
from agentserve.watch.fates import SeenPages
from agentserve.watch.state import Choice, scheduler_state, write_state

PUBLISH_EVERY_S = 2.0
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # SGLang sets it before its processes start


class Watcher:
    """What one scheduler process counts.

    Args:
        page_size: of the cache.
        folder: where the state file goes; None: nowhere.
    """

    def __init__(self, page_size: int, folder: Path | None) -> None:
        self._seen = SeenPages(page_size)
        self._counters = WatchCounters()
        self._folder = folder
        self._live: dict[str, Any] = {}  # requests from their prefill to their end
        self._computed: set[str] = set()  # those whose prompt is computed
        self._published = 0.0

    def step(self, scheduler: Any, batch: Any) -> None:
        """After the next prefill batch was chosen."""
        chunked = scheduler.chunked_req
        fresh = () if batch is None else batch.reqs
        # In the step after a request's last chunk its first token is there.
        waiting = {req.rid for req in fresh} | ({chunked.rid} if chunked is not None else set())
        for rid, req in list(self._live.items()):
            if req.finished():
                if rid not in self._computed and _aborted(req):
                    self._seen.abandoned(req.origin_input_ids, _salt(req))
                else:
                    # The last token has no KV: it was not computed.
                    tokens = array("q", req.origin_input_ids)
                    tokens.extend(req.output_ids[:-1])
                    self._seen.computed(tokens, _salt(req))
                del self._live[rid]
                self._computed.discard(rid)
            elif rid not in waiting and rid not in self._computed:
                self._seen.computed(req.origin_input_ids, _salt(req))
                self._computed.add(rid)
        for req in fresh:
            if not getattr(req, "agentserve_watched", False):
                req.agentserve_watched = True
                self._counters.began(self._seen.begin(req.origin_input_ids, req.cached_tokens, _salt(req)))
                self._live[req.rid] = req
        now = time.monotonic()
        if self._folder is not None and now - self._published >= PUBLISH_EVERY_S:
            self._published = now
            self._publish(scheduler)

    def _publish(self, scheduler: Any) -> None:
        cache = scheduler.tree_cache
        table = getattr(cache, "table", None)
        now = cache.tree_core.now if table is not None else 0.0
        settings = settings_from()
        choice = Choice() if settings is None else Choice(settings.eviction, settings.admission)
        assert self._folder is not None
        try:
            write_state(self._folder, scheduler_state(table, choice, now, time.time()))
        except OSError:
            self._folder = None  # a full disk must not stop the scheduler; the page says how old its state is


def _aborted(req: Any) -> bool:
    return bool(req.finished_reason.to_json().get("type") == "abort")


def _salt(req: Any) -> str:
    return repr((req.extra_key, req.cache_salt)) if req.extra_key or req.cache_salt else ""


def after_prefill_batch(plan: Any, scheduler: Any, running_batch: Any) -> None:
    """AFTER ``Scheduler.get_new_batch_prefill``."""
    watcher = getattr(scheduler, "agentserve_watcher", None)
    if watcher is None:
        watcher = scheduler.agentserve_watcher = _make(scheduler)
    if isinstance(watcher, Watcher):
        watcher.step(scheduler, plan.batch_to_run)


def _make(scheduler: Any) -> Watcher | bool:
    """False where this process is not the one that counts."""
    from sglang.srt.runtime_context import get_observability, get_parallel

    if get_parallel().tp_rank != 0 or not get_observability().enable_metrics:
        return False
    folder = os.environ.get(_FOLDER)
    return Watcher(scheduler.tree_cache.page_size, Path(folder) if folder else None)
