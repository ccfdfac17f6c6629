"""Parking: a session is held before its next prompt while it and all older sessions exceed ``limit`` of the cache.

Use it for the highest throughput: it admits more than a gate does, overcommits a little (1.10, since not all
sessions compute at once), and takes back what proves too much, newest first. A parked session loses its prefix
before running ones do.
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
