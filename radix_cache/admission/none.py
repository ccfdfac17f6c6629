"""No admission control: every session starts at once. What servers do today."""

from __future__ import annotations

from radix_cache.admission.base import AdmissionPolicy, register


@register("none")
def none() -> AdmissionPolicy:
    return AdmissionPolicy("none")
