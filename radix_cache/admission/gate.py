"""A gate: a session starts only while the contexts that run fill less than ``limit`` of the cache.

Use it where the live contexts nearly fit: started sessions run undisturbed, new ones wait their turn. A session that
has started is never held, so contexts that grow can still overfill the cache; leave room (0.9). What it gains, and
how long sessions wait: ``docs/design/policies.md``.
Source: the working-set rule, Denning, "The working set model for program behavior", CACM 11(5), 1968.
"""

from __future__ import annotations

from radix_cache.admission.base import AdmissionPolicy, register


@register("gate")
def gate(limit: float = 0.9) -> AdmissionPolicy:
    """``limit``: part of the capacity."""
    if limit <= 0:
        raise ValueError(f"admission policy gate: the limit must be above 0, got {limit}")

    def start(others: float, own: float, capacity: float) -> bool:
        return others < limit * capacity

    return AdmissionPolicy("gate", start=start)
