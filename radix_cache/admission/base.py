"""The contract of session admission, and its registry.

Where memory is short it is better to let fewer conversations run than to evict what all of them need. An
admission policy answers two questions from token counts alone; both answers are asked again whenever a request or
a conversation ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def always(others: float, own: float, capacity: float) -> bool:
    """Nothing waits."""
    return True


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Attributes:

    name: as registered.
    start: may a new session send its first prompt? Given the tokens of all running sessions' contexts, the
        session's own first prompt, and the cache's capacity.
    go_on: may a session send its next prompt, or must it be parked? Given the tokens of all *older* sessions'
        contexts, its own, and the capacity. Seniority makes parking fair to those who started first, and free
        of oscillation.

    A session with no other (``start``) or no older (``go_on``) session beside it is never held.
    """

    name: str
    start: Callable[[float, float, float], bool] = always
    go_on: Callable[[float, float, float], bool] = always


ADMISSION: dict[str, Callable[..., AdmissionPolicy]] = {}


def register(
    name: str,
) -> Callable[[Callable[..., AdmissionPolicy]], Callable[..., AdmissionPolicy]]:
    """Make a function of numeric parameters known as the policy ``name``."""

    def keep(build: Callable[..., AdmissionPolicy]) -> Callable[..., AdmissionPolicy]:
        if name in ADMISSION:
            raise ValueError(f"admission policy {name!r} is registered twice")
        ADMISSION[name] = build
        return build

    return keep
