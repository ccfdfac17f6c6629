"""What a request heard from an offload tier, and which cause that gives to pages that the tier had stored. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from radix_cache.attribution.causes import Cause


class TierAnswer(NamedTuple):
    """What asking an offload tier came to, for one request; tokens count from the prompt's beginning.

    Attributes:
        lookup: ``late``: no answer in time, so it was given up. ``offline``: the tier was known to be away and was not
            asked.
        found: tokens that the tier said it has.
        refused_from: tokens before the first page that was not asked for, since it had been refused before; None where
            all was asked for.
        load: what loading came to; None: nothing was loaded, as where there was no room.
    """

    lookup: Literal["hit", "miss", "late", "offline"]
    found: int = 0
    refused_from: int | None = None
    load: Literal["restored", "late", "refused", "failed"] | None = None

    def cause_at(self, at: int) -> Cause:
        """Why a token that the tier had stored, ``at`` tokens into the prompt, was not restored."""
        if self.lookup == "late":
            return Cause.RESTORED_LATE
        if self.lookup == "offline":
            return Cause.OFFLOAD_REFUSED
        if at >= self.found:
            return Cause.OFFLOAD_LOST
        if self.refused_from is not None and at >= self.refused_from:
            return Cause.OFFLOAD_REFUSED
        return {"late": Cause.RESTORED_LATE, "refused": Cause.OFFLOAD_REFUSED, "failed": Cause.OFFLOAD_REFUSED}.get(
            self.load or "", Cause.NOT_RESTORED
        )

    def borders(self) -> list[int]:
        """Where the cause may change, in tokens."""
        return [self.found] if self.refused_from is None else sorted((self.found, self.refused_from))
