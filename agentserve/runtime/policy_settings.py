"""How ``agentserve launch`` tells the server's processes which policies to run: a few environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from radix_cache.admission import admission_policy
from radix_cache.eviction import EvictionPolicy, eviction_policy

BACKEND = "agentserve"  # as --radix-cache-backend names it

EVICTION_VARIABLE = "AGENTSERVE_EVICTION"
ADMISSION_VARIABLE = "AGENTSERVE_ADMISSION"
TRUNCATE_VARIABLE = "AGENTSERVE_TRUNCATE"


class PolicySettings(NamedTuple):
    """Policies as their specifications, see ``radix_cache.spec``."""

    eviction: str
    admission: str = "none"
    truncate: bool = True  # the last victim loses only the pages that are needed

    def check(self) -> None:
        """Raise ValueError, saying what there is, unless both policies exist and run live."""
        live_eviction(self.eviction)
        admission_policy(self.admission)

    def environment(self) -> dict[str, str]:
        """Variables for the server, which ``settings_from`` reads there."""
        return {
            EVICTION_VARIABLE: self.eviction,
            ADMISSION_VARIABLE: self.admission,
            TRUNCATE_VARIABLE: "1" if self.truncate else "0",
        }


def live_eviction(spec: str) -> EvictionPolicy:
    """The eviction policy that ``spec`` names. Raises ValueError for one that only a simulator can run."""
    policy = eviction_policy(spec)
    if policy.offline:
        raise ValueError(f"eviction policy {policy.name!r} knows the future: it runs in `agentserve simulate` only")
    return policy


def settings_from(environment: Mapping[str, str] = os.environ) -> PolicySettings | None:
    """What was asked for; None where nothing was, and then nothing of this may touch SGLang."""
    eviction = environment.get(EVICTION_VARIABLE)
    if not eviction:
        return None
    return PolicySettings(
        eviction,
        environment.get(ADMISSION_VARIABLE) or "none",
        environment.get(TRUNCATE_VARIABLE, "1") != "0",
    )
