"""LMCache's connector where every tensor-parallel rank has a daemon of its own.

LMCache 0.5.6 knows one daemon, which rank 0 asks for the shards of all ranks. Here each rank asks its own daemon for
its own shard; what all have is the hit, and who has more gives the locks of the rest back. The keys are those of one
daemon for all, so both ways find each other's objects in a shared Redis. Checked against lmcache 0.5.6.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from lmcache.integration.sglang import unified_lmcache_mp_connector as upstream
from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLookupOperation

from offload.settings import OffloadError, OffloadSettings


class RankConnector(upstream.UnifiedLMCacheMPConnector):
    """Takes upstream's arguments, by keyword, and the settings that name the daemons.

    Raises:
        OffloadError: the daemons are not as many as the ranks, or there are pipeline stages beside them.
    """

    def __init__(self, *, settings: OffloadSettings, tp_size: int, tp_rank: int, pp_size: int = 1, **kwargs: Any):
        self.own_daemon = bool(settings.rank_addresses)
        if self.own_daemon and pp_size > 1:
            raise OffloadError("one daemon a rank does not run with pipeline parallelism; set offload.daemons to one")
        self._alone = False  # whether this rank's answer to a lookup is being read, without the others'
        self._own_hits: dict[str, int] = {}  # requests whose lookup this rank's daemon has answered -> tokens
        host, port = settings.address(tp_rank, tp_size)
        # Upstream reads its configuration in its constructor, and all ranks get the same environment.
        os.environ.update({"LMCACHE_MP_HOST": host, "LMCACHE_MP_PORT": str(port)})
        super().__init__(tp_size=tp_size, tp_rank=tp_rank, pp_size=pp_size, **kwargs)

    @property
    def is_lookup_leader(self) -> bool:
        return self.own_daemon or self._lookup_leader

    def _create_key(self, operation: LMCacheLookupOperation, *, start: int, end: int, worker_id: int | None) -> Any:
        if worker_id is None and self.own_daemon:
            worker_id = self.kv_worker_id  # None asks for the shards of all ranks
        return super()._create_key(operation, start=start, end=end, worker_id=worker_id)

    def answered(self, request_id: str) -> bool:
        """Whether this rank's own daemon has answered the lookup, though another rank's has not."""
        return request_id in self._own_hits

    def answer_is_there(self, operation: LMCacheLookupOperation, wait_s: float) -> bool:
        """Whether this rank's daemon has answered a lookup, though nobody may have looked for the answer so far.

        Upstream asks for the answer at one poll and reads it at a later one, and polls come with the scheduler's
        steps: a long step, or a long wait in the queue, is no fault of the daemon.
        """
        end = time.monotonic() + wait_s
        try:
            if operation.completion_future is None and operation.submission_future is not None:
                operation.submission_future.result(timeout=wait_s)
                operation.completion_future = self._req_client.query_prefetch_status(operation.request_id)
            if operation.completion_future is None:
                return True
            left = max(0.0, end - time.monotonic())
            return operation.completion_future.result(timeout=left) is not None
        except TimeoutError:
            return False
        except Exception:  # a failed request: upstream reads it as a miss
            return True

    def poll_lookup(self, operation: LMCacheLookupOperation) -> int | None:
        """Tokens that all ranks can load; None while a rank waits. All ranks must ask together."""
        if not self.own_daemon or operation.total_hit_tokens is not None:
            hit: int | None = super().poll_lookup(operation)
            return hit
        name = operation.request_id
        if name not in self._own_hits:
            self._read_own(operation)
        agreed = torch.tensor([self._own_hits.get(name, -1)], dtype=torch.int64)
        self._parallel_all_reduce(agreed, torch.distributed.ReduceOp.MIN)
        common = int(agreed.item())
        if common < 0:
            return None
        self.limit_hit(operation, common, self._own_hits.pop(name))
        return common

    def _read_own(self, operation: LMCacheLookupOperation) -> None:
        """Poll this rank's daemon, which gives its answer once; nobody may act on it before the others have theirs."""
        stored = self._store_submitted_tokens.get(operation.request_id)
        self._alone = True
        try:
            own = super().poll_lookup(operation)
        finally:
            self._alone = False
        if own is None:
            return
        self._own_hits[operation.request_id] = own
        operation.total_hit_tokens = None
        operation.locks_held = False
        if stored is None:
            self._store_submitted_tokens.pop(operation.request_id, None)
        else:
            self._store_submitted_tokens[operation.request_id] = stored

    def limit_hit(self, operation: LMCacheLookupOperation, tokens: int, locked: int) -> None:
        """Make ``tokens`` the hit of a lookup that holds locks for ``locked``, and free the locks of the rest."""
        if tokens < locked and self.is_lookup_leader:
            key = self._create_key(operation, start=tokens, end=locked, worker_id=None)
            self._track_control_future(self._req_client.free_lookup_locks(key, self.kv_world_size))
        operation.total_hit_tokens = tokens
        operation.locks_held = tokens > 0
        self._store_submitted_tokens[operation.request_id] = tokens

    def _sync_leader_int(self, value: int) -> int:
        return value if self._alone else int(super()._sync_leader_int(value))

    def end_session(self, request_id: str) -> None:
        self._own_hits.pop(request_id, None)
        super().end_session(request_id)
