"""The records that compiled code works on, made in Python, with the arrays behind their addresses."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from radix_cache.eviction import EvictionPolicy
from radix_cache.gaps import AGE_BINS, AGE_EDGES, GAP_ROWS, RANK_ROWS, GapTable, new_counts
from radix_cache.simulator.evictions import empty_log
from radix_cache.simulator.jit import compiled_eviction
from radix_cache.simulator.layout import CACHE, FATE, NONE, ORDER, PLACE, Records
from radix_cache.simulator.loop import LOOP
from radix_cache.simulator.queue import EVENT
from radix_cache.simulator.uses import Future
from radix_cache.simulator.workload import Workload


class Arrays:
    """A record for compiled code and the arrays whose addresses it holds, kept alive as long as it is.

    Attributes:
        record: what compiled functions take, one record of ``dtype``.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.record: Any = np.zeros(1, dtype=dtype)[0]
        self._kept: list[Any] = []

    def put(self, field: str, array: Any) -> Any:
        """Write an array's address to a field."""
        assert array.flags.c_contiguous
        self._kept.append(array)
        self.record[field] = array.ctypes.data
        return array

    def call(self, field: str, function: Any) -> None:
        """Write the address of a compiled C function to a field."""
        self._kept.append(function)
        self.record[field] = function.address


class Cache(Arrays):
    """One cache with the workload that runs on it."""

    def __init__(self, workload: Workload, nodes: Records, policy: EvictionPolicy, future: Future) -> None:
        super().__init__(CACHE)
        self._orders = self.put("order", np.zeros(2, dtype=ORDER))
        self._nodes = self.put("nodes", nodes)
        self._used = len(workload.nodes)
        self._set_order(0, policy)
        self._orders[1]["learned"] = NONE
        self.put("requests", workload.requests)
        self.put("flows", workload.flows.copy())
        self.fates = self.put("fates", np.zeros(len(workload.requests), dtype=FATE))
        self.put("running", np.zeros(len(workload.flows) + 1, dtype=np.int32))
        self.put("counts", new_counts())
        self.put("fresh", np.zeros(GAP_ROWS, dtype=np.int32))
        self.put("next_use", future.next_use)
        self.put("plans", future.plans)
        self.keep_log(0)
        self.record["known"] = len(future.plans) > 0
        self.record["page"] = workload.page_size

    def keep_log(self, room: int) -> None:
        """Log up to ``room`` evictions."""
        self.log = self.put("log", empty_log(room))
        self.record["log_room"] = room

    def add_host_tier(self, capacity: int, policy: EvictionPolicy) -> None:
        self._set_order(1, policy)
        self.record["host_capacity"] = capacity // int(self.record["page"])

    def _set_order(self, tier: int, policy: EvictionPolicy) -> None:
        order = Order(policy, len(self._nodes), self._used)
        self._kept.append(order)
        self._orders[tier] = order.record


class Order(Arrays):
    """An empty victim order."""

    def __init__(self, policy: EvictionPolicy, nodes: int, used: int) -> None:
        super().__init__(ORDER)
        group, key = compiled_eviction(policy)
        bins = AGE_BINS if policy.learned_groups else 1
        ranks = np.repeat(np.arange(policy.groups, dtype=np.float64)[:, None], bins, axis=1)
        learned = NONE
        if policy.learned_groups:
            learned = policy.learned_groups[0]
            if policy.learned_groups != tuple(range(learned, learned + RANK_ROWS)):
                raise ValueError(f"policy {policy.name}: it must learn {RANK_ROWS} groups in a row, one a row of ranks")
            ranks -= policy.groups  # below every learned rank, which is at least 0
            ranks[learned:] = first_ranks()
        places = np.zeros(nodes, dtype=PLACE)
        places["bucket"][:used] = NONE  # of the others when they come into use: until then they take no memory
        self.put("places", places)
        buckets = policy.groups * bins
        self.put("roots", np.full(buckets, NONE, dtype=np.int32))
        self.put("alive", np.zeros(buckets + 1, dtype=np.int32))
        self.put("listed", np.full(buckets, NONE, dtype=np.int32))
        self.put("ranks", ranks)
        self.put("edges", AGE_EDGES)
        if group is not None:
            self.call("group", group)
        self.call("key", key)
        for name, value in {"groups": policy.groups, "bins": bins, "uses_depth": policy.uses_depth}.items():
            self.record[name] = value
        self.record["learned"] = learned


@functools.cache
def first_ranks() -> npt.NDArray[np.float64]:
    """Learned ranks before the first gap, shape ``(RANK_ROWS, AGE_BINS)``."""
    return GapTable().ranks


class Loop(Arrays):
    """Everything outside the caches."""

    def __init__(self, workload: Workload, clients: int, order: npt.NDArray[np.int32]) -> None:
        super().__init__(LOOP)
        self.put("events", np.zeros(len(workload.flows) + 8, dtype=EVENT))
        self.put("waiting", np.zeros(len(workload.requests), dtype=np.int32))
        self.put("active", np.zeros(clients, dtype=np.int32))
        self.put("order", order)
        self.put("free_since", np.zeros(clients))
        self.sessions = self.put("sessions", workload.sessions.copy())
        self.put("joins", workload.requests["joins"].copy())
        self.record["clients"] = clients
        self.record["session_count"] = len(order)
