"""SGLang's radix tree with nodes that carry what our policies ask for, and victims in their order.

Only the choice of the next device victim is ours; matching, inserting, locking and freeing are SGLang's. Written
against the Python tree core of sglang 0.5.23.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

from agentserve.runtime.policy_counters import PolicyCounters
from agentserve.runtime.policy_journal import Journal
from agentserve.runtime.policy_order import VictimOrder
from agentserve.runtime.policy_sessions import Flow
from radix_cache.eviction import EvictionPolicy
from radix_cache.features import FlowState, NodeFeatures, Stop
from radix_cache.gaps import SHARED_GAPS, GapTable

_FULL = ComponentType.FULL
_NEVER = float("inf")
SCORED_A_STEP = 64  # leaves; a step of the scheduler uses fewer, and scoring that many takes well under a millisecond


class LivePolicy(NamedTuple):
    """What a tree core needs of the policy."""

    eviction: EvictionPolicy
    gaps: GapTable
    counters: PolicyCounters
    truncate: bool
    journal: Journal


class PolicyNode(UnifiedTreeNode):
    """A node that knows its users.

    Attributes:
        last_used: seconds; when SGLang last moved ``last_access_time``, its own logical clock.
        depth: tokens from the root to the node's end.
        owner: flow of the last use; None before a request was seen to use it.
        first: flow of the first use.
        seen: last use by a prompt, in seconds, for the gaps of shared nodes.
    """

    def __init__(self, core: PolicyTreeCore, priority: int) -> None:
        self._core = core
        self.last_used = core.now
        self.inserted = core.now
        self.seen = core.now
        self.depth = 0
        self.owner: Flow | None = None
        self.first: Flow | None = None
        self.shared = False
        self.superseded = False
        self.stop = Stop.UNKNOWN
        self.pace = -1.0
        self.context = 0
        super().__init__(core.component_types, priority=priority)

    @property
    def last_access_time(self) -> float:
        return self._stamp

    @last_access_time.setter
    def last_access_time(self, stamp: float) -> None:
        self._stamp = stamp
        self.last_used = self._core.now
        self._core.changed.add(self)

    def note_user(self, flow: Flow) -> None:
        if self.first is None:
            self.first = flow
        elif self.first is not flow:
            self.shared = True
        self.superseded = False
        self.owner = flow
        self.stop = flow.stop
        self.pace = flow.pace
        self.context = flow.context


class _Use(NamedTuple):
    seconds: float
    stamp: float  # on SGLang's logical clock


class _Leaves(set[PolicyNode]):
    """SGLang's set of evictable leaves; what becomes one is scored before the next choice."""

    def __init__(self, changed: set[PolicyNode]) -> None:
        super().__init__()
        self._changed = changed

    def add(self, node: PolicyNode) -> None:
        super().add(node)
        self._changed.add(node)


class _HostStrategy:
    """The same order for SGLang's eviction from host memory, which scores all leaves each time."""

    def __init__(self, core: PolicyTreeCore) -> None:
        self._core = core

    def get_priority(self, node: PolicyNode) -> tuple[Any, ...]:
        group, key = self._core.score(node, len(node.key))
        return (*self._core.order.rank(group, key, self._core.now), key, node.last_access_time)


class PolicyTreeCore(UnifiedTreeCore):
    """The tree; ``now`` is set by the cache, and all that one scheduler step does happens at that instant."""

    def __init__(self, params: Any, components: Any, live: LivePolicy) -> None:
        self.live = live
        self.now = 0.0
        self.changed: set[PolicyNode] = set()
        self.shared_learned = 0
        super().__init__(params, components)
        self.eviction_strategy = _HostStrategy(self)

    def reset(self) -> None:
        self.changed.clear()
        self.order: VictimOrder[PolicyNode] = VictimOrder(self.live.eviction, self.live.gaps)
        super().reset()
        self.evictable_device_leaves = _Leaves(self.changed)

    def _new_node(self, priority: int = 0) -> PolicyNode:
        node = PolicyNode(self, priority)
        self._register_node(node)
        return node

    def _add_new_node(self, parent: PolicyNode, key: Any, *args: Any, **kwargs: Any) -> PolicyNode:
        node: PolicyNode = super()._add_new_node(parent, key, *args, **kwargs)
        node.depth = parent.depth + len(key)
        return node

    def _split_node(self, key: Any, child: PolicyNode, split_len: int) -> tuple[PolicyNode, Any]:
        used = _Use(child.last_used, child.last_access_time)
        head, action = super()._split_node(key, child, split_len)
        head.depth = child.depth - len(child.key)
        for name in ("inserted", "seen", "owner", "first", "shared", "superseded", "stop", "pace", "context"):
            setattr(head, name, getattr(child, name))
        if self.live.truncate:
            # SGLang makes the tail of a split node the most recent of all, though nothing used it. Where whole
            # nodes go, its way is kept in all respects: lru then names the very victims that SGLang's own does.
            child.last_access_time = used.stamp
            child.last_used = used.seconds
        return head, action

    def score(self, node: PolicyNode, size: int) -> tuple[int, float]:
        """(group, key) of a node of which the last ``size`` tokens would go."""
        features = self._features(node, size)
        return self.live.eviction.group(features), self.live.eviction.key(features)

    def _features(self, node: PolicyNode, size: int) -> NodeFeatures:
        owner = node.owner
        # By position, in the order of the fields: every use of a leaf passes here, and names take twice as long.
        return NodeFeatures(
            self.now,
            node.last_used,  # last_access
            node.stop,
            node.pace,
            owner.state if owner is not None else FlowState.LIVE,
            1.0 if node.superseded and not node.shared else 0.0,
            2.0 if node.shared else 1.0,  # sharers
            node.depth,
            size,
            node.context,
            max(0, node.hit_count - 1),  # SGLang counts the insertion itself as the first hit
            node.inserted,
            _NEVER,  # next_use
        )

    def score_changed(self) -> None:
        """Bring the order up to date with all uses since the last call."""
        if self.changed:
            self._score(self.changed)
            self.changed.clear()

    def score_some(self) -> None:
        """Score a few of the leaves that were used, so that no eviction finds all of them waiting for it."""
        if self.changed:
            few = [self.changed.pop() for _ in range(min(SCORED_A_STEP, len(self.changed)))]
            began = time.perf_counter()
            self._score(few)
            self.live.counters.chose(time.perf_counter() - began)

    def _score(self, nodes: Iterable[PolicyNode]) -> None:
        size = self.page_size if self.live.truncate else 0
        leaves = self.evictable_device_leaves
        scored = []
        for node in nodes:
            if node in leaves:
                group, key = self.score(node, size or len(node.key))
                scored.append((node, group, key, node.last_access_time))
        self.order.put_all(scored)

    def alive(self, node: PolicyNode | None) -> PolicyNode | None:
        """The node, or its nearest ancestor that is still in the tree."""
        while node is not None and self._node_arena.get(node.id) is not node:
            node = node.parent
        return None if node is self.root_node else node

    def note_match(self, flow: Flow, node_id: int) -> None:
        """A request of ``flow`` begins at the node its prompt matched up to: its other branch is abandoned."""
        node: PolicyNode = self.node_by_id(node_id)
        found = False
        above: PolicyNode | None = node if node is not self.root_node else None
        while above is not None and above is not self.root_node:
            if not found and (above.shared or (above.first is not None and above.first is not flow)):
                found = True
                self.shared_learned += self.live.gaps.observe(SHARED_GAPS, self.now - above.seen)
            above.seen = self.now
            above = above.parent
        self._supersede(flow, node)

    def _supersede(self, flow: Flow, new: PolicyNode) -> None:
        old = self.alive(flow.tip)
        kept = set()
        node: PolicyNode | None = new
        while node is not None:
            kept.add(node)
            node = node.parent
        while old is not None and old not in kept:
            if not old.shared:
                old.superseded = True
                self.changed.add(old)
            old = old.parent

    def note_path(self, flow: Flow, node_id: int) -> None:
        """The flow's newest sequence now ends at this node."""
        tip: PolicyNode = self.node_by_id(node_id)
        self._supersede(flow, tip)
        node = tip
        while node is not self.root_node:
            node.note_user(flow)
            self.changed.add(node)
            node = node.parent
        flow.tip = tip

    def note_state(self, flow: Flow) -> None:
        """The flow ended, was parked or goes on: its newest sequence is scored again."""
        node = self.alive(flow.tip)
        if node is not None:
            self.changed.add(node)


def victim_kind(node: PolicyNode) -> str:
    """What a counter calls a victim."""
    if node.superseded and not node.shared:
        return "superseded"
    if node.shared:
        return "shared"
    if node.owner is None:
        return "unknown"
    if node.owner.state != FlowState.LIVE:
        return str(FlowState(node.owner.state).name.lower())
    return f"waits_{Stop(node.stop).name.lower()}"


class PolicyFullComponent(FullComponent):
    """Chooses device victims from the tree core's order."""

    tree_core: PolicyTreeCore
    wanted: int | None = None  # tokens the allocation is short of; set by the cache for one walk

    def _evict_device_start(self, request_cnt: int) -> None:
        self._ensure_eviction_strategy()
        self._evict_device_request_cnt = request_cnt
        self._chosen: list[PolicyNode] = []
        began = time.perf_counter()
        self.tree_core.score_changed()
        self.tree_core.order.grow_old(self.tree_core.now)
        self.tree_core.live.counters.chose(time.perf_counter() - began)

    def _evict_device_next_node(
        self, tracker: Any, device_frees: Any, host_frees: Any, cache_actions: Any
    ) -> int | None:
        if tracker[self.component_type] >= self._evict_device_request_cnt:
            return None
        core = self.tree_core
        began = time.perf_counter()
        core.score_changed()
        node = core.order.pop()
        while node is not None and node not in core.evictable_device_leaves:
            node = core.order.pop()
        core.live.counters.chose(time.perf_counter() - began)
        if node is None:
            return None
        wanted = self._evict_device_request_cnt if self.wanted is None else self.wanted
        self._chosen.append(node)
        cut = self._cut(node, wanted - tracker[self.component_type], cache_actions)
        core.live.counters.evicted(victim_kind(node), len(node.key), cut)
        core.live.journal.note("evict", "" if node.owner is None else node.owner.id, core.now, len(node.key))
        return node.id

    def _cut(self, node: PolicyNode, tokens: int, cache_actions: Any) -> bool:
        """Leave of a victim only the last pages that are needed; true when something of it stays."""
        core = self.tree_core
        page = core.page_size
        going = max(page, -(-tokens // page) * page)
        if not core.live.truncate or going >= len(node.key) or node.load_back_pending_id is not None:
            return False
        used = _Use(node.last_used, node.last_access_time)
        head, action = core._split_node(node.key, node, len(node.key) - going)
        head.last_access_time = used.stamp
        head.last_used = used.seconds
        if action is not None:
            cache_actions.append(action)
        return True

    def _evict_device_end(self) -> None:
        # A victim stays when its copy to the host failed; it must be found again the next time.
        self.tree_core.changed.update(self._chosen)
        self._chosen = []
        self.wanted = None
