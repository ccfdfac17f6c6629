"""Parking: a session is held before its next prompt while it and all older sessions exceed ``limit`` of the cache.

Use it where memory is far short of the live contexts: every session starts, a little too much is let run (1.10,
since not all sessions compute at once), and what proves too much is held back, newest first. A parked session
loses its prefix before running ones do. Compared with a gate: ``docs/design/policies.md``.
Source: load control by suspending the youngest process, Denning 1968 (see ``gate``).
"""

from __future__ import annotations

from radix_cache.admission.base import AdmissionPolicy, register


@register("parking")
def parking(limit: float = 1.10) -> AdmissionPolicy:
    """``limit``: part of the capacity."""
    if limit <= 0:
        raise ValueError(f"admission policy parking: the limit must be above 0, got {limit}")

    def go_on(others: float, own: float, capacity: float) -> bool:
        return others + own <= limit * capacity

    return AdmissionPolicy("parking", go_on=go_on)
