"""One fast path's line in the audit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Verdict = Literal["runs", "off", "not eligible", "not executed", "not proven"]


@dataclass(frozen=True, slots=True)
class AuditRow:
    """What is known of one fast path.

    Attributes:
        path: its name.
        configured: whether it was asked for; None: cannot be seen from outside.
        setting: what asks for it, and the value found.
        eligible: whether the condition that decides holds; None: depends on what the server does not report.
        condition: that condition, with the numbers found.
        executed: how often it ran, by a counter of the server; None: nothing counts it.
        counter: what was counted, or why nothing is.
    """

    path: str
    configured: bool | None
    setting: str
    eligible: bool | None
    condition: str
    executed: float | None
    counter: str

    @property
    def verdict(self) -> Verdict:
        """The weakest link. A path without a counter is never more than "not proven", however well configured."""
        if self.executed:
            return "runs"
        if self.configured is False:
            return "off"
        if self.eligible is False:
            return "not eligible"
        return "not proven" if self.executed is None else "not executed"

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "verdict": self.verdict}
