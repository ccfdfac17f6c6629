"""SGLang's LMCache radix cache with a quarantine. Checked against sglang 0.5.23."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.storage.lmcache import lmcache_unified_radix_cache as upstream

from agentserve.runtime import speculation
from agentserve.runtime.offload_counters import OffloadCounters
from agentserve.runtime.sglang_lmcache_connector import GuardedConnector, LoadAbandoned
from agentserve.runtime.sglang_lmcache_events import publish_stored
from agentserve.runtime.sglang_lmcache_pool import draft_of
from offload.guard import Held, Quarantine
from offload.settings import OffloadError


class GuardedRadixCache(upstream.LMCacheUnifiedRadixCache):
    """Slots of an abandoned load are nobody's until the daemon is done with it or dead."""

    lmcache_connector: GuardedConnector

    def __init__(self, params: Any, **kwargs: Any) -> None:
        from agentserve.runtime import sglang_plugin

        sglang_plugin.require_applied(sglang_plugin.offload_hooks())
        # Whoever asks for a draft's tokens by pairs has no draft to restore, or keys that do not name what they hold.
        drafting = speculation.settings_from() is not None
        if params.is_eagle or drafting != (draft_of(params.token_to_kv_pool_allocator.get_kvcache()) is not None):
            raise OffloadError(
                "offload needs the draft's pool and a radix tree keyed by tokens: start EAGLE3 by `agentserve launch "
                "--eagle3`, without eagle3.radix_keys pair"
            )
        self._quarantine = Quarantine()
        self._tells = params.enable_kv_cache_events
        if self._tells and params.tree_core_backend is None:
            params.tree_core_backend = "python"  # the Rust core hands out no nodes, and events are made of them
        super().__init__(params, **kwargs)
        connector = self.lmcache_connector
        connector.counters = OffloadCounters(
            kwargs["tp_rank"], enabled=params.enable_metrics, deadlines=connector.deadlines
        )
        connector.counters.online(connector.online)

    def _start_external_load(self, flow: Any, req: Any) -> int | None:
        connector = self.lmcache_connector
        if not connector.all_online() or not self._device_has_what_it_continues(flow):
            return None
        try:
            return super()._start_external_load(flow, req)
        except LoadAbandoned:
            load = flow.load
            held = Held(load.future, connector.daemon_gone(), load.device_indices)
            self._quarantine.add(held)
            # One daemon for all ranks unlocks by one session, which must not end before the last rank's load.
            connector.outstanding(load.request_id, held)
            connector.counters.tokens("quarantined", len(load.device_indices))
            flow.load = None
            flow.load_req = None
            self._release_flow_anchor(flow)
            return None

    def _device_has_what_it_continues(self, flow: Any) -> bool:
        """Whether the device still has, on all ranks, what a load is to continue.

        It is not locked while a request that was looked up waits for room. Upstream loads what is behind the hole, and
        the scheduler stops with "HiCache load-back must commit all promised FULL tokens or none".
        """
        here = self.match_prefix(MatchPrefixParams(key=flow.key[: flow.local_hit_tokens])).device_prefix_len
        return bool(self.lmcache_connector._sync_success(here == flow.local_hit_tokens))

    def check_hicache_events(self) -> None:
        """Called once at the beginning of each step of the scheduler (``Scheduler.get_next_batch_to_run``)."""
        self.lmcache_connector.step()
        pending = [
            (store.operation, self.tree_core.node_by_id(store.node_id)) for store in self._pending_stores if self._tells
        ]
        super().check_hicache_events()
        for operation, node in pending[: len(pending) - len(self._pending_stores)]:
            if operation.result:
                publish_stored(self.tree_core.kv_events, node, operation.start, operation.end)
        if not len(self._quarantine):
            return
        # All ranks set the same loads aside; what one frees all free, or their allocators part.
        ready = torch.tensor([self._quarantine.ready()], dtype=torch.int64)
        self.lmcache_connector.parallel_all_reduce(ready, torch.distributed.ReduceOp.MIN)
        for slots in self._quarantine.release(int(ready.item())):
            self.token_to_kv_pool_allocator.free(slots)
            self.lmcache_connector.counters.tokens("released", len(slots))

    def shutdown(self) -> None:
        # Ranks end on their own: what this one's daemon is done with is over, so that its session is ended, too. The
        # next server may use the same names, and the daemon would take its prompts for the old ones.
        self._quarantine.release(self._quarantine.ready())
        super().shutdown()

    def has_pending_cache_operations(self) -> bool:
        # SGLang then neither flushes the pool nor counts the slots as leaked.
        return bool(len(self._quarantine)) or super().has_pending_cache_operations()
