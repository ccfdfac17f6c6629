"""The future, for policies that may know it: which request needs a node next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from radix_cache.simulator.jit import jit
from radix_cache.simulator.layout import NONE, PLAN, ROOT, Records
from radix_cache.simulator.workload import Workload


@jit
def _sweep(nodes: Any, requests: Any, order: Any, offsets: Any, uses: Any, coming: Any) -> None:
    """Backwards through the known order: note who comes next to each node of a request's path."""
    for i in range(len(order) - 1, -1, -1):
        request = order[i]
        r = requests[request]
        node = r.kv  # at or below where the prompt ends
        while node != ROOT:
            uses[offsets[request] + nodes[node].level] = coming[node]
            node = nodes[node].parent
        node = r.cap
        while node != ROOT:
            coming[node] = request
            node = nodes[node].parent


@jit
def _note_elapsed(requests: Any, flows: Any, think_cap: float, decode: float, plans: Any) -> None:
    for flow in range(len(flows)):
        request = flows[flow].first
        at = 0.0
        while request != NONE:
            r = requests[request]
            plans[request].elapsed = at
            at += r.output / decode if np.isnan(r.service) else r.service
            request = r.next
            if request != NONE:
                at += min(requests[request].think, think_cap)


@dataclass(frozen=True, eq=False)
class Future:
    """What a policy that knows the future reads; all empty for the others."""

    next_use: npt.NDArray[np.int32]  # next request by (request, level of the node in its path), flat
    plans: Records  # PLAN, by request


UNKNOWN = Future(np.empty(0, np.int32), np.empty(0, PLAN))


def fits(workload: Workload, capacity: int) -> npt.NDArray[np.bool_]:
    """Which requests a cache of ``capacity`` tokens has room for, by request."""
    requests, page = workload.requests, workload.page_size
    pages = (requests["prompt"] + requests["output"] + (page - 1)) // page
    return np.asarray(pages <= capacity // page)


def known_future(workload: Workload, fates: Records, *, capacity: int, think_cap: float, decode_speed: float) -> Future:
    """The future as an earlier run saw it: ``fates`` with the start of each request and their order.

    Requests larger than ``capacity`` (tokens) will be rejected: no page is kept for them.
    """
    requests, nodes = workload.requests, workload.nodes
    order = np.argsort(fates["start_stamp"], kind="stable").astype(np.int32)
    order = order[fits(workload, capacity)[order]]
    depth = nodes["level"][requests["kv"]].astype(np.int64) + 1
    offsets = np.concatenate(([0], np.cumsum(depth)[:-1]))
    uses = np.full(int(depth.sum()), NONE, dtype=np.int32)
    _sweep(nodes, requests, order, offsets, uses, np.full(len(nodes), NONE, dtype=np.int32))
    plans = np.zeros(len(requests), dtype=PLAN)
    plans["next_use"] = offsets
    plans["expected"] = fates["start"]
    _note_elapsed(requests, workload.flows, think_cap, decode_speed, plans)
    return Future(uses, plans)
