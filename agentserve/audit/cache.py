"""Prefix hits, offload, and the element type of the cache."""

from __future__ import annotations

from agentserve.audit.counters import (
    CACHED_TOKENS,
    HOST_BACKUP_TOKENS,
    HOST_LOAD_TOKENS,
    KV_MEMORY_GB,
    KV_TOKENS,
    OFFLOAD_ONLINE,
    OFFLOAD_TOKENS,
    PAGE_SIZE,
    Metrics,
)
from agentserve.audit.facts import Facts
from agentserve.audit.row import AuditRow
from agentserve.runtime.index_reuse import REUSE_VARIABLE, IndexReuseError, parse_index_reuse
from offload.settings import SETTINGS_VARIABLE
from offload.state import bytes_per_token, prefix_state_planes, shareable_layers

_PLAIN = ("bfloat16", "float32")
_FP8 = "fp8_e4m3"  # e5m2 has the same size
# The gauge is a sum of rounded pools.
_TOLERANCE = 0.002


def radix_hit(facts: Facts, metrics: Metrics) -> AuditRow:
    """Prompt tokens found in the radix cache, whatever tier they came from."""
    off = bool(facts.arg("disable_radix_cache", False))
    hits = metrics.count(CACHED_TOKENS)
    tiers = ", ".join(
        f"{tier} {count:,.0f}"
        for tier in ("device", "host", "storage")
        if (count := metrics.count(CACHED_TOKENS, cache_source=tier))
    )
    return AuditRow(
        "radix hit",
        not off,
        f"disable_radix_cache is {off}",
        True,
        f"prompts share at least one page of {facts.page_size} tokens",
        hits,
        f"prompt tokens ({CACHED_TOKENS}{': ' + tiers if tiers else ''})",
    )


def offload_store(facts: Facts, metrics: Metrics) -> AuditRow:
    """Tokens written to a tier below the device."""
    return _offload(facts, metrics, "offload store", "stored", HOST_BACKUP_TOKENS)


def offload_load(facts: Facts, metrics: Metrics) -> AuditRow:
    """Tokens brought back from a tier below the device."""
    return _offload(facts, metrics, "offload load", "restored", HOST_LOAD_TOKENS)


def _offload(facts: Facts, metrics: Metrics, path: str, event: str, host_counter: str) -> AuditRow:
    if facts.arg("enable_hierarchical_cache", False):
        condition = "HiCache allocates its host pool at the start"
        counter = f"tokens ({host_counter})"
        return AuditRow(path, True, "enable_hierarchical_cache", True, condition, metrics.count(host_counter), counter)
    lmcache = bool(facts.arg("enable_lmcache", False))
    online = metrics.total(OFFLOAD_ONLINE)
    executed = metrics.count(OFFLOAD_TOKENS, event=event)
    eligible: bool | None
    if not lmcache:
        eligible, condition = False, "no tier below the device"
    elif online is None:
        eligible = False if facts.variable(SETTINGS_VARIABLE) == "" else None
        condition = "M3's state needs agentserve's connector, which reports nothing here"
    else:
        eligible, condition = bool(online), f"the daemon is in use: {OFFLOAD_ONLINE} is {online:g}"
    return AuditRow(
        path,
        lmcache,
        f"enable_lmcache is {lmcache}",
        eligible,
        condition,
        executed,
        f"tokens ({OFFLOAD_TOKENS}, {event})",
    )


def fp8_cache(facts: Facts, metrics: Metrics) -> AuditRow:
    """K/V in 8 bits, proved by the size of the allocated pool."""
    dtype = str(facts.arg("kv_cache_dtype", "auto"))
    executed, proof = _stored_in_fp8(facts, metrics)
    return AuditRow(
        "FP8 K/V",
        dtype.startswith("fp8"),
        f"kv_cache_dtype is {dtype}",
        facts.device != "cpu",
        "a GPU" if facts.device != "cpu" else "a GPU, this is a CPU: torch attention takes no scaled FP8",
        executed,
        proof,
    )


def _stored_in_fp8(facts: Facts, metrics: Metrics) -> tuple[float | None, str]:
    memory, tokens = metrics.total(KV_MEMORY_GB), metrics.total(KV_TOKENS)
    if not memory or not tokens:
        return None, f"nothing shows it: /metrics has no {KV_MEMORY_GB}"
    # One page more than the capacity is allocated: slot 0 takes the writes of padding rows.
    measured = memory * 2**30 / (tokens + (metrics.total(PAGE_SIZE) or facts.page_size))
    if facts.config is None:
        return None, f"{measured:,.0f} B a token are allocated; config unknown, pass --recipe"
    sources = None
    try:
        if reuse := facts.variable(REUSE_VARIABLE):
            sources = parse_index_reuse(reuse).pattern(shareable_layers(facts.config)).sources
    except IndexReuseError:
        return None, f"{measured:,.0f} B a token are allocated; {REUSE_VARIABLE} cannot be read"
    for kv in (_FP8, *_PLAIN):
        for index in (_FP8, *_PLAIN):
            planes = prefix_state_planes(
                facts.config, kv_dtype=kv, index_dtype=index, tp=facts.tp, index_sources=sources
            )
            expected = bytes_per_token(planes)
            if abs(measured - expected) <= _TOLERANCE * expected:
                named = "FP8" if kv == _FP8 else kv
                return float(kv == _FP8), f"FP8 pools: {measured:,.0f} B a token are K/V in {named}, index K in {index}"
    return None, f"{measured:,.0f} B a token are allocated, which fit no layout known here"
