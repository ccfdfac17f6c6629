"""LMCache's connector that leaves no read lock behind with its daemon.

A lookup locks what it finds; a load or an unlock takes the lock off. LMCache 0.5.6 ends a request's session without
either where the lookup was given up or the request was aborted meanwhile, and then nobody knows what was locked. What
is owed, and when it may be given back, is in ``offload.owed``. Checked against lmcache 0.5.6.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLoadOperation, LMCacheLookupOperation
from lmcache.integration.sglang.unified_lmcache_mp_connector import _ImmediateFuture

from agentserve.runtime.sglang_lmcache_daemon import DaemonConnector
from offload.guard import Pending
from offload.owed import Asked, OwedLocks
from offload.settings import OffloadSettings

logger = logging.getLogger(__name__)


class Unsent(_ImmediateFuture):
    """A load that failed before it was sent: failed at once, and over when the daemon has its locks back."""

    def __init__(self, unlocked: Pending) -> None:
        super().__init__(False)
        self._unlocked = unlocked

    def query(self) -> bool:
        return self._unlocked.query()


class LockConnector(DaemonConnector):
    """Takes ``DaemonConnector``'s arguments."""

    def __init__(self, *, settings: OffloadSettings, **kwargs: Any) -> None:
        self._asked: dict[str, Asked] = {}  # requests that the daemon has been asked for
        self._owed = OwedLocks()
        self._settling = threading.Lock()
        self._answer_s = settings.ping_deadline
        super().__init__(settings=settings, **kwargs)

    def outstanding(self, request_id: str, answer: Pending) -> None:
        """The session of a request is not to be ended before this answer is in."""
        self._asked.setdefault(request_id, Asked(time.monotonic(), self.daemon_gone())).after.append(answer)

    def submit_lookup(
        self, request_id: str, token_ids: list[int], *, local_hit_tokens: int, cache_salt: str
    ) -> LMCacheLookupOperation:
        self._asked[request_id] = Asked(time.monotonic(), self.daemon_gone())
        return super().submit_lookup(request_id, token_ids, local_hit_tokens=local_hit_tokens, cache_salt=cache_salt)

    def owe_lookup(self, operation: LMCacheLookupOperation) -> None:
        """A lookup whose answer nobody will use: the daemon locks what it finds all the same."""
        asked = self._asked.get(operation.request_id)
        if asked is not None and operation.submission_future is not None:
            end = len(operation.token_ids) // self.chunk_size * self.chunk_size
            asked.key = self._create_key(operation, start=0, end=end, worker_id=None)
            asked.after.append(operation.submission_future)

    def free_lookup_locks(self, request_id: str, start: int, end: int) -> None:
        self._unlock(request_id, lambda: super(LockConnector, self).free_lookup_locks(request_id, start, end))

    def limit_hit(self, operation: LMCacheLookupOperation, tokens: int, locked: int) -> None:
        self._unlock(operation.request_id, lambda: super(LockConnector, self).limit_hit(operation, tokens, locked))

    def _unlock(self, request_id: str, send: Callable[[], None]) -> None:
        """Unlock, and keep the answer: a session that is ended before it is in no longer knows what was locked."""
        before = self._control_futures[-1:]
        send()
        sent = self._control_futures[-1:]
        if sent and sent != before and request_id in self._asked:
            self._asked[request_id].after.append(sent[0])

    def submit_load(
        self, operation: LMCacheLookupOperation, device_indices: Any, **kwargs: Any
    ) -> LMCacheLoadOperation:
        load = super().submit_load(operation, device_indices, **kwargs)
        if isinstance(load.future, _ImmediateFuture):
            load.future = Unsent(self._unlock_own(load))
        # The daemon unlocks what it has loaded, or refused to, by its session.
        self.outstanding(operation.request_id, load.future)
        operation.locks_held = False
        return load

    def _unlock_own(self, load: LMCacheLoadOperation) -> Pending:
        """Give back this rank's locks for a load that was not sent; other ranks' loads take off theirs."""
        key = self._create_key(load.lookup, start=load.start, end=load.end, worker_id=self.kv_worker_id)
        try:
            answer: Pending = self._req_client.free_lookup_locks(key, self.kv_world_size)
        except Exception as error:  # all ranks must come to the end of this load together
            logger.warning("locks of %s stay with the daemon until they end: %s", load.request_id, error)
            answer = load.future
        return answer

    def end_session(self, request_id: str) -> None:
        operation = self._lookups.get(request_id)
        if operation is not None and operation.total_hit_tokens is None:
            self.owe_lookup(operation)
        asked = self._asked.pop(request_id, None)
        if asked is not None and request_id in self._active_sessions and self.is_lookup_leader:
            if operation is not None and operation.locks_held:
                start, end = operation.lock_start, operation.total_hit_tokens
                asked.key = self._create_key(operation, start=start, end=end, worker_id=None)
            if not (self.online and asked.clear):
                self._active_sessions.discard(request_id)
                self._owed.add(request_id, asked)
        super().end_session(request_id)

    def owes(self, request_id: str) -> bool:
        """Whether an earlier lookup of this name is not settled; the daemon knows one a name."""
        return request_id in self._owed

    def on_sign_of_life(self) -> None:
        super().on_sign_of_life()
        self.settle_owed()

    def settle_owed(self) -> None:
        """Give back the locks of requests that are over, and end their sessions. Stops at the first one that fails.

        A daemon keeps a lookup until its answer is read, also one that was meant for its predecessor.
        """
        with self._settling:  # an unlock that is sent twice takes another request's lock away
            for request, key, in_time in self._owed.due():
                try:
                    if key is not None:
                        found = self._req_client.query_prefetch_status(request).result(timeout=self._answer_s)
                        if found is None and in_time:
                            continue  # it is on its way from Redis, and nothing can be unlocked before
                    if key is not None and in_time:
                        unlock = self._req_client.free_lookup_locks(key, self.kv_world_size)
                        self._owed.unlocking(request, unlock)
                        unlock.result(timeout=self._answer_s)
                    self._req_client.end_session(request).result(timeout=self._answer_s)
                except Exception as error:  # a busy daemon: whether it is lost is for the signs of life to say
                    logger.debug("locks of %s are given back later: %s", request, error)
                    return
                self._owed.done(request)
