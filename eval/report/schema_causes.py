"""The attribution's part of the report's JSON; see ``schema`` for what stays stable."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EventEvidence(_Model):
    """What the attribution rests on."""

    kind: Literal["events", "none"]  # none: only the part that is sound without cache events
    text: str
    batches: int = 0
    gaps: int = 0  # jumps in the server's numbering of batches
    lost_batches: int = 0


class CauseRow(_Model):
    cause: str  # radix_cache.attribution.Cause
    title: str
    definition: str
    tokens: int  # lost_tokens - gained_tokens
    lost_tokens: int
    gained_tokens: int  # hit, though theory does not count it: "overtaken" and "unexplained"
    requests: int
    rate_difference: float  # tokens / prompt tokens of the population


class EvictionRow(_Model):
    """Lost tokens by what the memory was needed for and by what the victim was doing."""

    cause: str  # evicted or offload_lost
    by: str
    by_title: str
    victim: str
    victim_title: str
    tokens: int


class EvictorRow(_Model):
    """A session whose requests made others, or itself, lose tokens."""

    session: str
    tokens_of_others: int
    tokens_of_itself: int


class SessionCauses(_Model):
    session: str
    gap_tokens: int
    causes: dict[str, int]


class DepthCauses(_Model):
    """Lost tokens by their position in the prompt."""

    from_token: int
    to_token: int | None  # None: to the end
    causes: dict[str, int]


class ContextChange(_Model):
    session: str
    flow: str
    turn: int
    kind: Literal["edit", "compaction"]
    at_token: int  # tokens that still match
    dropped_tokens: int  # of the previous prompt, at least
    lost_tokens: int = 0  # of this prompt: would have hit, had the client left the previous one as it was
    cause: str | None = None  # eval.diagnose; None: the texts are not known
    cause_title: str = ""


class ChangeCause(_Model):
    """Changes with one probable cause."""

    cause: str  # eval.diagnose.RULES, or "unknown" where the texts are not known
    title: str
    remedy: str
    changes: int
    lost_tokens: int


class ContextChanges(_Model):
    """What clients changed in their own prompts. No part of the gap: it lowers the ideal itself."""

    edits: int
    compactions: int
    dropped_tokens: int
    lost_tokens: int = 0  # of the prompts: would have hit, had clients left their histories as they were
    by_cause: list[ChangeCause] = []  # most lost tokens first
    largest: list[ContextChange]


class RealizedByTier(_Model):
    """Hit tokens by where they were found, as the server says of each request."""

    device: int
    host: int
    storage: int  # LMCache: SGLang counts all of it as storage


class LargestCause(_Model):
    """What cost most: a cause of the gap, or what clients changed in their own prompts."""

    kind: Literal["gap", "context_change"]
    cause: str
    title: str
    tokens: int


class AttributionReport(_Model):
    """Why the hits are not ideal: ideal - sum(causes) = realized, in tokens, exactly."""

    evidence: EventEvidence
    prompt_tokens: int
    ideal_tokens: int
    realized_tokens: int
    realized_by_tier: RealizedByTier | None = None
    gap_tokens: int
    unexplained_tokens: int  # lost and gained ones added up, so that they cannot hide each other
    unexplained_fraction: float  # of the gap
    causes: list[CauseRow]  # in the order of the chain; "unexplained" is always there
    evictions: list[EvictionRow]
    evictors: list[EvictorRow]
    by_session: list[SessionCauses]
    by_depth: list[DepthCauses]
    context_changes: ContextChanges
    largest: LargestCause | None = None  # None: nothing was lost
