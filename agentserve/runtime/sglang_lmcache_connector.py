"""LMCache's connector with deadlines, a name for the model's state, and sealed pages.

LMCache 0.5.6's own connector waits for its daemon without limit. What may be decided without LMCache is in
``offload.guard``. Checked against sglang 0.5.23 and lmcache 0.5.6.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any

import torch
from lmcache.integration.sglang.lmcache_mp_metadata import LMCacheLoadOperation, LMCacheLookupOperation

from agentserve.runtime.request_facts import BOOK, note_load, note_lookup
from agentserve.runtime.sglang_lmcache_locks import LockConnector
from agentserve.runtime.sglang_lmcache_pool import planes_of, seals_of, state_name
from agentserve.runtime.sglang_lmcache_tiers import TierQuestions
from offload.guard import DeadlineFuture, Looks, Refused
from offload.seal import Sealer, pages_of
from offload.settings import OffloadError, settings_from

logger = logging.getLogger(__name__)

_SLICE_S = 0.05  # how often a waiting load looks whether the daemon was lost meanwhile
_FIRST_LOOK_S = 0.02  # a daemon answers in less; else the request waits for a whole step of the scheduler
_ANSWER_S = 0.2  # how long a lookup that is late is asked after once more


class LoadAbandoned(BaseException):
    """A load that was refused, late or wrong.

    Not an ``Exception``: upstream catches those around a load and frees its slots at once, though a late daemon may
    still write to them.
    """


class GuardedConnector(LockConnector):
    """Takes upstream's arguments."""

    def __init__(self, *, model_config: Any, token_to_kv_pool_allocator: Any, **kwargs: Any) -> None:
        settings = settings_from()
        if settings is None:
            raise OffloadError("offload is not configured: start the server with `agentserve launch --offload lmcache`")
        self._pool = token_to_kv_pool_allocator.get_kvcache()
        self._sealer: Sealer | None = None
        self._refused = Refused()
        self._looks: dict[str, Looks] = {}  # of lookups that are not answered yet
        self._given_up: dict[str, str] = {}  # lookups given up here, not yet on all ranks -> why
        self._tiers = TierQuestions(settings.tiers)
        self._model_config = model_config
        super().__init__(
            settings=settings,
            model_config=model_config,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            **kwargs,
        )

    def register_kv_cache(self) -> None:
        """Called by upstream's constructor once the tensors are known."""
        self.model_name = state_name(self._pool, self._model_config, self.page_size, self.chunk_size)
        seals = seals_of(self._pool)
        if seals is not None:
            planes = [plane.tensor for plane in planes_of(self._pool)]
            self._sealer = Sealer(planes, seals, self.page_size, self.model_name)
        super().register_kv_cache()

    # --- lookup

    def submit_lookup(
        self, request_id: str, token_ids: list[int], *, local_hit_tokens: int, cache_salt: str
    ) -> LMCacheLookupOperation:
        # A request that comes back while its locks are still owed: the daemon knows one lookup a name.
        if not self._sync_success(self.online and not self.owes(request_id)):
            self.counters.lookup("offline")
            note_lookup(request_id, "offline")
            operation = LMCacheLookupOperation(
                request_id, list(token_ids), int(local_hit_tokens), cache_salt, total_hit_tokens=0
            )
            self._lookups[request_id] = operation
            return operation
        return super().submit_lookup(request_id, token_ids, local_hit_tokens=local_hit_tokens, cache_salt=cache_salt)

    def poll_lookup(self, operation: LMCacheLookupOperation) -> int | None:
        if operation.total_hit_tokens is not None:
            return operation.total_hit_tokens
        name = operation.request_id
        # From the first poll: until then the request waited for something else.
        now = time.monotonic()
        if name not in self._looks:
            self._looks[name] = Looks(now)
            if self.is_lookup_leader and self.online and not self.answered(name):
                self.answer_is_there(operation, _FIRST_LOOK_S)
        looks = self._looks[name]
        if self.is_lookup_leader and not self.answered(name):
            self._give_up_where_late(operation, looks, now)
        hit = super().poll_lookup(operation)
        if hit is None:
            looks.missed(now)
            return None
        del self._looks[name]
        self.counters.took("lookup", looks.held_s + time.monotonic() - now)
        outcome = self._given_up.pop(name, "hit" if hit else "miss")
        self.counters.lookup(outcome)
        note_lookup(name, outcome, hit)
        if outcome == "hit" and self.is_lookup_leader:
            self._tiers.ask(self._req_client, name)
        return self._before_refused(operation, hit) if hit and self._sealer is not None else hit

    def _give_up_where_late(self, operation: LMCacheLookupOperation, looks: Looks, now: float) -> None:
        deadline = self._offload.lookup_deadline
        overdue = looks.overdue(now, deadline)
        late = overdue or looks.last_chance(now, deadline)
        if self.online and (not late or self.answer_is_there(operation, _ANSWER_S)):
            return
        self.owe_lookup(operation)
        operation.submission_future = None  # upstream reads this as a miss
        self._given_up[operation.request_id] = "late" if late else "offline"
        if overdue:
            self._trouble("a lookup was not answered in time")

    def step(self) -> None:
        """The scheduler begins a step."""
        now = time.monotonic()
        for looks in self._looks.values():
            looks.step(now)

    def _before_refused(self, operation: LMCacheLookupOperation, hit: int) -> int:
        """The tokens of a hit before the first page that any rank has refused lately; the rest is not asked for."""
        assert self._sealer is not None
        good = hit
        if len(self._refused):
            digests = self._sealer.digests(operation.token_ids[:hit], operation.cache_salt, 0).tolist()
            good = self._refused.first(digests) * self.page_size // self.chunk_size * self.chunk_size
        agreed = torch.tensor([good], dtype=torch.int64)
        self.parallel_all_reduce(agreed, torch.distributed.ReduceOp.MIN)
        good = int(agreed.item())
        if good < hit:
            BOOK.of(operation.request_id)["refused_from"] = good
            self.limit_hit(operation, good, hit)
        return good

    # --- load

    def prepare_load_on_stream(self, operation: LMCacheLoadOperation, stream: Any) -> bool:
        """Wait until the load is done or ordered before ``stream``; True, or LoadAbandoned on all ranks."""
        started = time.monotonic()
        success = self._sync_success(self._wait_for(operation, stream, started))
        if success and self._sealer is not None:
            success = self._sync_success(self._verified(operation, stream))
        self.counters.waited("load", time.monotonic() - started)
        self.counters.took("load", time.monotonic() - started)
        if success:
            self._count_restored(operation)
            return True
        operation.result = False
        self._cleanup_lookup_result(operation.lookup)
        raise LoadAbandoned

    def _count_restored(self, operation: LMCacheLoadOperation) -> None:
        name = operation.request_id
        note_load(name, "restored")
        self.counters.tokens("restored", operation.end - operation.local_hit_tokens)
        in_host = self._tiers.host_tokens(name) if self.is_lookup_leader else -1
        if not self.own_daemon:
            in_host = self._sync_leader_int(in_host)
        self._tiers.note_restored(self.counters, name, operation.local_hit_tokens, operation.end, in_host)

    def _wait_for(self, operation: LMCacheLoadOperation, stream: Any, started: float) -> bool:
        deadline = started + self._offload.load_deadline
        while True:
            try:
                if operation.future.wait_on_stream(stream, timeout=_SLICE_S):
                    return True
                self._trouble("it refused a load")
                note_load(operation.request_id, "failed")
                return False
            except TimeoutError:
                late = self.online
                if not late:
                    logger.warning("load for %s given up: the daemon was lost", operation.request_id)
                elif time.monotonic() >= deadline:
                    self._trouble(f"a load was not done after {self._offload.load_deadline} s")
                else:
                    continue
                self.counters.tokens("abandoned", operation.end - operation.local_hit_tokens)
                note_load(operation.request_id, "late" if late else "failed")
                return False
            except Exception as error:
                self._trouble(f"a load failed: {error}")
                note_load(operation.request_id, "failed")
                return False

    def _verified(self, operation: LMCacheLoadOperation, stream: Any) -> bool:
        assert self._sealer is not None
        pages = pages_of(operation.device_indices, self.page_size)
        digests = self._sealer.digests(
            operation.token_ids[: operation.end],
            operation.lookup.cache_salt,
            operation.local_hit_tokens // self.page_size,
        )
        on_device = pages.device.type != "cpu"
        with torch.get_device_module(pages.device).stream(stream) if on_device else nullcontext():
            bad = self._sealer.wrong(pages, digests)
        self._refused.add(digests[bad].tolist())
        wrong = int(bad.sum())
        self.counters.tokens("verified", (len(pages) - wrong) * self.page_size)
        if wrong:
            note_load(operation.request_id, "refused")
            self.counters.tokens("refused", len(pages) * self.page_size)
            logger.error(
                "LMCache returned a prefix for %s of which %d of %d pages are not what was stored: recomputing it",
                operation.request_id,
                wrong,
                len(pages),
            )
        return not wrong

    # --- store

    def submit_store(
        self,
        request_id: str,
        token_ids: list[int],
        device_indices: list[torch.Tensor] | torch.Tensor,
        *,
        device_indices_start: int,
        cache_salt: str,
    ) -> Any:
        if not self.all_online():
            return None
        end = len(token_ids) // self.chunk_size * self.chunk_size
        start = self.get_store_start(request_id, end)
        if self._sealer is not None and end > start:
            slots = self._normalize_group_indices(device_indices)[0]
            pages = pages_of(slots[start - device_indices_start : end - device_indices_start], self.page_size)
            self._sealer.write(pages, self._sealer.digests(token_ids[:end], cache_salt, start // self.page_size))
        operation = super().submit_store(
            request_id, token_ids, device_indices, device_indices_start=device_indices_start, cache_salt=cache_salt
        )
        if operation is not None:
            gone = self.daemon_gone()
            self.outstanding(request_id, operation.future)  # a store that is late begins its session anew
            operation.future = DeadlineFuture(
                operation.future,
                time.monotonic() + self._offload.store_deadline,
                # A daemon that reads late stores whatever is in the slots by then under this prefix's key. Seals
                # find that; without them the slots stay as they are until it is done or dead.
                may_give_up=lambda: self._sealer is not None,
                gone=gone,
            )
        return operation

    def complete_store(self, operation: Any, *, synchronize: bool = True) -> bool:
        success = bool(super().complete_store(operation, synchronize=synchronize))
        if isinstance(operation.future, DeadlineFuture):
            self.counters.took("store", operation.future.waited_s)
        self.counters.tokens("stored" if success else "abandoned", operation.end - operation.start)
        if not success:
            self._trouble("a store failed or was late")
        return success

    # --- ends

    def end_session(self, request_id: str) -> None:
        self._looks.pop(request_id, None)
        self._given_up.pop(request_id, None)
        self._tiers.forget(request_id)
        super().end_session(request_id)

    def close(self) -> None:
        if self.online:
            self.end_all_sessions()
            self.settle_owed()
        else:
            self._registered = False
            self._active_sessions.clear()
            self._control_futures.clear()
        self._mq_timeout = self._offload.ping_deadline
        super().close()
