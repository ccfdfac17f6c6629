"""Inside LMCache's daemon: how much of what a lookup found lay in host memory, and not in the Redis behind it.

LMCache 0.5.6 answers a lookup with a number of chunks; where they were goes to its own metrics only. This is one of
its server modules (``--server-module``), which listens to the same event. Checked against lmcache 0.5.6.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

METHOD = "agentserve.found_in_host"  # request id -> tokens, both as text; no tokens where it is not known
_EVENT_S = 0.2  # events come by a thread of their own, the lookup's answer may be faster
_REMEMBERED = 4096  # lookups that nobody asked about


class TierModule:
    """Tokens that the latest lookup of a request found in host memory, given out once."""

    def __init__(self, context: Any) -> None:
        self.context = context  # LMCache wants it of every module
        self._found: OrderedDict[str, int] = OrderedDict()
        self._news = threading.Condition()
        context.event_bus.subscribe(EventType.MP_LOOKUP_PREFETCH_END, self._note)

    def _note(self, event: Event) -> None:
        with self._news:
            self._found[event.session_id] = int(event.metadata["l1_hit_tokens"])
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
            self._news.notify_all()

    @server_module_handler(METHOD)  # type: ignore[untyped-decorator]
    def found_in_host(self, payload: bytes) -> bytes:
        request = payload.decode()
        with self._news:
            self._news.wait_for(lambda: request in self._found, timeout=_EVENT_S)
            found = self._found.pop(request, None)
        return b"" if found is None else str(found).encode()

    def report_status(self) -> dict[str, Any]:
        return {"agentserve_tiers": {"remembered": len(self._found)}}

    def close(self) -> None:
        """There is nothing to release."""


def build_server_modules(build: Any) -> TierModule:
    """The name by which LMCache looks for modules; ``build`` is its ``ExtServerModuleBuildContext``."""
    return TierModule(build.server_context)
