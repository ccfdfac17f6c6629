"""Index reuse, and not producing what nobody reads."""

from __future__ import annotations

from agentserve.audit.counters import PRODUCERS_SKIPPED, SELECTIONS_REUSED, Metrics
from agentserve.audit.facts import NOT_REPORTED, Facts
from agentserve.audit.row import AuditRow
from agentserve.runtime.index_reuse import PRODUCERS_VARIABLE, REUSE_VARIABLE, ROCM_VARIABLE
from offload.state import shareable_layers

_ROCM_COUNTS_NOTHING = "nothing counts it: on ROCm it is SGLang's own, which has no counter"


def index_reuse(facts: Facts, metrics: Metrics) -> AuditRow:
    """Sparse layers take over the block selection of an earlier one."""
    ours, rocm = facts.variable(REUSE_VARIABLE), facts.variable(ROCM_VARIABLE)
    executed: float | None = metrics.count(SELECTIONS_REUSED)
    counter = f"selections taken over ({SELECTIONS_REUSED})"
    if ours:
        configured, setting = True, f"{REUSE_VARIABLE}={ours}"
    elif executed:
        configured, setting = True, "seen running"
    elif ours is None or rocm is None:
        configured, setting = None, NOT_REPORTED
    elif rocm.isdecimal() and int(rocm) > 1:
        configured, setting = True, f"{ROCM_VARIABLE}={rocm}"
        if facts.device == "rocm":
            executed, counter = None, _ROCM_COUNTS_NOTHING
    else:
        configured, setting = False, f"{REUSE_VARIABLE} is not set"
    eligible, condition = _can_share(facts, ours_is_used=bool(ours) or not rocm)
    return AuditRow("index reuse", configured, setting, eligible, condition, executed, counter)


def producer_skip(facts: Facts, metrics: Metrics) -> AuditRow:
    """Layers that reuse a selection run no index projections, norms, RoPE and cache writes."""
    ours, keeps = facts.variable(REUSE_VARIABLE), facts.variable(PRODUCERS_VARIABLE)
    executed = metrics.count(PRODUCERS_SKIPPED)
    if ours is None:
        configured, setting = (True, "seen running") if executed else (None, NOT_REPORTED)
    else:
        configured = bool(ours) and keeps != "keep"
        setting = f"index reuse with {PRODUCERS_VARIABLE}={keeps or 'skip'}" if ours else "comes with our index reuse"
    eligible, condition = _can_share(facts, ours_is_used=True)
    counter = f"producers not run ({PRODUCERS_SKIPPED})"
    return AuditRow("index producer skip", configured, setting, eligible, condition, executed, counter)


def _can_share(facts: Facts, *, ours_is_used: bool) -> tuple[bool | None, str]:
    if facts.arg("enable_two_batch_overlap", False):
        return False, "does not run with two-batch overlap, which is on"
    if ours_is_used and int(facts.arg("pp_size", 1)) > 1:
        return False, f"does not run with pipeline parallelism, pp is {facts.arg('pp_size')}"
    if not ours_is_used and facts.device != "rocm":
        return (None if facts.device is None else False), f"{ROCM_VARIABLE} is read on gfx95 only"
    if facts.config is None:
        return None, "at least two sparse layers without index values: config unknown, pass --recipe"
    layers = len(shareable_layers(facts.config))
    return layers > 1, f"at least two sparse layers without index values: {layers}"
