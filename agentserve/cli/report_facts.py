"""What the simulator must know of a run's server: its policy, and the bytes of a cached token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentserve.audit.counters import KV_MEMORY_GB, KV_TOKENS, PAGE_SIZE, Metrics
from agentserve.runtime.policy_settings import BACKEND
from eval.report.what_if import Serving
from radix_cache.eviction import eviction_policy

EVICTED = "agentserve_evicted_tokens_total"  # labelled with the policy; agentserve/runtime/policy_counters.py
_ASSUMED = "lru"


def serving_of_run(
    args: Mapping[str, Any], metrics: tuple[str, str] | None, *, bytes_per_token: float | None = None
) -> Serving:
    """A recorded run's server.

    Args:
        args: the server's arguments, as the run's header has them.
        metrics: its counters at the start and at the end of the run, in the Prometheus text format.
        bytes_per_token: of all ranks together, where the caller knows them; else as the server's pools show.
    """
    end = _metrics(metrics)
    policy, told, whole = _policy(args, end)
    return Serving(policy, told, whole, bytes_per_token or measured_bytes(args, end))


def measured_bytes(args: Mapping[str, Any], metrics: Metrics | None) -> float | None:
    """Bytes of a cached token over all ranks, from the size of the allocated pools; None where that is not told."""
    if metrics is None:
        return None
    memory, tokens = metrics.total(KV_MEMORY_GB), metrics.total(KV_TOKENS)
    if not memory or not tokens:
        return None
    # One page more than the capacity is allocated: slot 0 takes the writes of padding rows.
    page = metrics.total(PAGE_SIZE) or int(args.get("page_size") or 1)
    return int(args.get("tp_size") or 1) * memory * 2**30 / (tokens + page)


def _policy(args: Mapping[str, Any], metrics: Metrics | None) -> tuple[str, str, bool]:
    """Policy, where it is known from, and whether whole radix nodes are evicted."""
    if args.get("radix_cache_backend") == BACKEND:
        told = "" if metrics is None else metrics.labels(EVICTED).get("policy", "")
        if _known(told):
            return told, "as its counters say; its admission, if it has one, is not told and not simulated", False
        return _ASSUMED, "assumed: the server has agentserve's policies and did not say which", False
    named = args.get("radix_eviction_policy")
    if isinstance(named, str) and _known(named):
        return named, "the server's radix_eviction_policy", True
    return _ASSUMED, "assumed: the server did not say" if named is None else f"assumed instead of {named}", True


def _known(spec: str) -> bool:
    try:
        return not eviction_policy(spec).offline
    except ValueError:
        return False


def _metrics(texts: tuple[str, str] | None) -> Metrics | None:
    if texts is None:
        return None
    try:
        return Metrics.from_text(texts[1])
    except ValueError:
        return None
