"""What a policy says of a node of the simulated tree."""

from __future__ import annotations

from typing import Any

from radix_cache.simulator.jit import core
from radix_cache.simulator.layout import NONE, PENDING, ROOT, fate_at, flow_at, node_at, plan_at, request_at
from radix_cache.simulator.memory import INDEX, call_float, call_int, record_at

INF = float("inf")


@core
def next_use(c: Any, node: int) -> float:
    """When the next request that needs the node will start, if nothing waits; inf when there is none."""
    if c.known == 0:
        return INF
    n = node_at(c, node)
    request = n.used_by
    while request != NONE:
        request = record_at(c.next_use, plan_at(c, request).next_use + n.level, INDEX).value
        if request != NONE and fate_at(c, request).status == PENDING:
            return due(c, request)
    return INF


@core
def due(c: Any, request: int) -> float:
    """When a request of the future will start: reckoned from what its flow did last."""
    newest = flow_at(c, request_at(c, request).flow).newest
    plan = plan_at(c, request)
    if newest == NONE:
        return float(plan.expected)
    return float(fate_at(c, newest).start + plan.elapsed - plan_at(c, newest).elapsed)


@core
def radix_length(c: Any, node: int) -> int:
    """Pages of the server's radix node that ends here."""
    length = 0
    while True:
        length += node_at(c, node).resident
        parent = node_at(c, node).parent
        if node == ROOT or node_at(c, parent).joined != node:
            return int(length)
        node = parent


@core
def score(c: Any, o: Any, node: int, depth: int, size: int) -> tuple[int, float]:
    """(group, key) of a node cut at ``depth`` pages, of which ``size`` would go."""
    n = node_at(c, node)
    features = (
        c.now,
        n.time,
        float(n.stop),
        n.pace,
        float(flow_at(c, n.owner).state),
        float(n.superseded),
        2.0 if n.shared != 0 else 1.0,
        float(depth * c.page),
        float(size * c.page),
        float(n.context),
        n.hits,
        n.inserted,
        next_use(c, node),
    )
    group = 0 if o.groups == 1 else call_int(o.group, features)
    return group, call_float(o.key, features)


@core
def worth_taking(c: Any, o: Any, node: int, end: int, wanted: int) -> int:
    """How many of the last ``wanted`` pages before ``end`` share the score of the last one."""
    if o.uses_depth == 0:
        return wanted
    group, key = score(c, o, node, end, 1)
    low, high = 1, wanted
    while low < high:
        middle = (low + high + 1) // 2
        g, k = score(c, o, node, end - middle + 1, 1)
        if g == group and k == key:
            low = middle
        else:
            high = middle - 1
    return low
