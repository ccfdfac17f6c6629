"""Which tier of the daemon restored tokens came from: host memory, or the Redis behind it."""

from __future__ import annotations

import logging
from typing import Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from agentserve.runtime.offload_counters import OffloadCounters
from agentserve.runtime.request_facts import BOOK
from offload.lmcache_tiers import METHOD
from offload.settings import Tiers

logger = logging.getLogger(__name__)

_ANSWER_S = 0.05  # the question was sent before the load, so the answer is nearly always there


class TierQuestions:
    """What the daemon says of single requests. Nobody waits for it: without an answer the tier is unknown.

    Args:
        tiers: what the daemon has.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._asked: dict[str, Any] = {}

    def ask(self, client: Any, request_id: str) -> None:
        """A lookup of this rank's daemon has found something. ``client``: LMCache's request client."""
        if self._tiers == "told":
            self._asked[request_id] = client.server_module_call(ServerModuleCallRequest(METHOD, request_id.encode()))

    def host_tokens(self, request_id: str) -> int:
        """Tokens from the prompt's beginning that lay in host memory when they were found; -1 where unknown."""
        asked = self._asked.pop(request_id, None)
        if asked is None:
            return -1
        try:
            answer = asked.result(timeout=_ANSWER_S)
            return int(answer.payload) if answer.success and answer.payload else -1
        except Exception as error:  # it is for a counter only
            logger.debug("where %s was found is not known: %s", request_id, error)
            return -1

    def forget(self, request_id: str) -> None:
        self._asked.pop(request_id, None)

    def note_restored(self, counters: OffloadCounters, request_id: str, start: int, end: int, host_tokens: int) -> None:
        """Tokens ``start`` to ``end`` of a prompt were restored, of which ``host_tokens`` lay in host memory."""
        if self._tiers == "host":
            host_tokens = end
        if host_tokens < 0:
            counters.restored("unknown", end - start)
            return
        host = max(0, min(end, host_tokens) - start)
        counters.restored("host", host)
        counters.restored("storage", end - start - host)
        BOOK.of(request_id)["from_storage"] = end - start - host
