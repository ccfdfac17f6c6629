"""What a check before the start found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: an error keeps the server from starting, a warning does not."""

    level: Literal["error", "warning"]
    what: str
    fix: str
