"""Our policies and LMCache in one radix cache: who goes, and what is worth storing. Checked against sglang 0.5.23."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from agentserve.runtime.sglang_lmcache_cache import GuardedRadixCache
from agentserve.runtime.sglang_policy_tree import PolicyNode
from agentserve.runtime.sglang_radix_cache import PolicyRadixCache
from offload.deferred import Deferred, DeferredStores
from offload.settings import OffloadError, settings_from
from radix_cache.admission.host import PathNode, worth_storing
from radix_cache.features import FlowState


class PolicyOffloadCache(PolicyRadixCache, GuardedRadixCache):
    """Upstream stores every whole chunk as soon as it is computed; here a moment after the request has ended.

    Everything is decided by the cache's own clock and table, so that all ranks decide the same in the same step.
    """

    def __init__(self, params: Any, **kwargs: Any) -> None:
        settings = settings_from()
        if settings is None:
            raise OffloadError("offload is not configured: start the server with `agentserve launch --offload lmcache`")
        self._deferred = DeferredStores(settings.store_delay)
        super().__init__(params, **kwargs)

    def _submit_store(self, req: Any, token_ids: list[int]) -> None:
        chunk = self.lmcache_connector.chunk_size
        tokens = token_ids[: len(token_ids) // chunk * chunk]  # an array, as the tree wants it
        start = self.lmcache_connector.get_store_start(req.rid, len(tokens))
        if start < len(tokens) and req.last_node is not None:
            node = self.tree_core.node_by_id(req.last_node)
            extra = (req.extra_key, req.cache_salt)
            self._deferred.put(Deferred(req.rid, self.flow_of(req).id, tokens, start, node, extra))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self._deferred.released(req.rid, self.tree_core.now)

    def check_hicache_events(self) -> None:
        super().check_hicache_events()
        for item in self._deferred.due(self.tree_core.now):
            self._decide(item)

    def reset(self) -> None:
        self._deferred.clear()
        super().reset()

    def _decide(self, item: Deferred) -> None:
        """Store what is worth it and still there."""
        connector, counters = self.lmcache_connector, self.lmcache_connector.counters
        chunk, wanted = connector.chunk_size, len(item.tokens)
        path = list(self._path(item.node))
        here = min(wanted, path[-1].depth if path else 0) // chunk * chunk
        worth = worth_storing(
            [
                PathNode(node.depth, node.shared, node.superseded, node.owner.state if node.owner else FlowState.LIVE)
                for node in path
            ]
        )
        tokens = max(item.start, min(here, worth.tokens // chunk * chunk))
        counters.not_stored("evicted", wanted - max(item.start, here))
        if here < wanted:
            self._deferred.lost(self.tree_core.now)
        counters.not_stored(worth.reason or "evicted", max(item.start, here) - tokens)
        if tokens <= item.start:
            return
        name = f"{item.request}.later"
        connector._store_submitted_tokens[name] = item.start
        extra_key, salt = item.extra
        # Looking the prefix up would make it the newest of the cache, though nobody has used it.
        used = [(node, node.last_access_time, node.last_used) for node in path]
        super()._submit_store(SimpleNamespace(rid=name, extra_key=extra_key, cache_salt=salt), item.tokens[:tokens])
        for node, stamp, seconds in used:
            node.last_access_time = stamp
            node.last_used = seconds
        self._request_session_finish(name)

    def _path(self, node: Any) -> Iterator[PolicyNode]:
        """What is left in the tree of the path to a node, from the root down."""
        found = []
        alive: Any = self.tree_core.alive(node)
        while alive is not None and alive is not self.tree_core.root_node:
            found.append(alive)
            alive = alive.parent
        return reversed(found)
