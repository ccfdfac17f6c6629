"""Why a prompt token that could have hit did not: the causes, and one loss as data."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Cause(StrEnum):
    """One cause a lost token, in the order of the chain from ideal to realized."""

    NOT_SHARED = "not_shared"
    PAGE_ALIGNMENT = "page_alignment"
    SPECULATION_KEY = "speculation_key"
    IN_FLIGHT = "in_flight"
    NOT_ADMITTED = "not_admitted"
    HELD = "held_by_admission"
    EVICTED = "evicted"
    OFFLOAD_LOST = "offload_lost"
    OFFLOAD_REFUSED = "offload_refused"
    RESTORED_LATE = "restored_late"
    NOT_RESTORED = "not_restored"
    NOT_OBSERVED = "not_observed"
    OVERTAKEN = "overtaken"
    UNEXPLAINED = "unexplained"


class EvictedBy(StrEnum):
    """What the memory was needed for."""

    NEW_SESSION = "new_session"
    SUBAGENT = "subagent"
    GROWTH = "growth"
    RECOMPUTE = "recompute"
    CLEARED = "cleared"
    UNKNOWN = "unknown"


class VictimState(StrEnum):
    """What the conversation that had used the tokens last was doing when they were evicted."""

    RUNNING = "running"
    TOOL_WAIT = "tool_wait"
    USER_WAIT = "user_wait"
    WAIT = "wait"
    SUPERSEDED = "superseded"
    ENDED = "ended"
    UNKNOWN = "unknown"


TITLES: dict[Cause, str] = {
    Cause.NOT_SHARED: "not shared across sessions",
    Cause.PAGE_ALIGNMENT: "page alignment",
    Cause.SPECULATION_KEY: "speculation's key",
    Cause.IN_FLIGHT: "still in flight",
    Cause.NOT_ADMITTED: "not admitted",
    Cause.EVICTED: "evicted",
    Cause.HELD: "held by admission",
    Cause.OFFLOAD_LOST: "lost in the offload tier",
    Cause.OFFLOAD_REFUSED: "refused by the offload tier",
    Cause.RESTORED_LATE: "restored too late",
    Cause.NOT_RESTORED: "not restored",
    Cause.NOT_OBSERVED: "not observed (no cache events)",
    Cause.OVERTAKEN: "overtaken (a gain)",
    Cause.UNEXPLAINED: "unexplained",
}

DEFINITIONS: dict[Cause, str] = {
    Cause.NOT_SHARED: "Only another session had these tokens, and this cache keeps sessions apart.",
    Cause.PAGE_ALIGNMENT: "Tokens after the last whole page of the common prefix.",
    Cause.SPECULATION_KEY: (
        "One page: with EAGLE the cache is keyed by pairs of tokens, so the last token of a common prefix has no key."
    ),
    Cause.IN_FLIGHT: "An earlier request shares these tokens, but had not finished computing them.",
    Cause.NOT_ADMITTED: (
        "An earlier request with these tokens ended, but the cache never took them; or this request itself was larger"
        " than the cache."
    ),
    Cause.EVICTED: "They were in the cache and had been evicted when the request looked for them.",
    Cause.HELD: "They were in the cache while admission held the request back, and evicted before it let it go.",
    Cause.OFFLOAD_LOST: "They had been stored in the offload tier, which did not have them any more.",
    Cause.OFFLOAD_REFUSED: (
        "They were in the offload tier, but it was away, refused them, or returned something else than was stored."
    ),
    Cause.RESTORED_LATE: "They were in the offload tier, which did not answer or deliver in time.",
    Cause.NOT_RESTORED: "They were in the offload tier, and the request did not get them; the server does not say why.",
    Cause.NOT_OBSERVED: (
        "They had been computed before the request was sent; without cache events nobody knows whether they were "
        "evicted, never admitted, or lost in an offload tier."
    ),
    Cause.OVERTAKEN: (
        "Hit beyond theory, so negative: a request that was sent later was computed first, and this one found what it"
        " left."
    ),
    Cause.UNEXPLAINED: "No evidence says why. Negative where the server hit more than the theory allows.",
}

BY_TITLES: dict[EvictedBy, str] = {
    EvictedBy.NEW_SESSION: "a new session's first request",
    EvictedBy.SUBAGENT: "a subagent",
    EvictedBy.GROWTH: "a conversation that grew",
    EvictedBy.RECOMPUTE: "recomputing what had been evicted before",
    EvictedBy.CLEARED: "the cache being cleared",
    EvictedBy.UNKNOWN: "unknown",
}

STATE_TITLES: dict[VictimState, str] = {
    VictimState.RUNNING: "its next request was already waiting or running",
    VictimState.TOOL_WAIT: "waiting for a tool",
    VictimState.USER_WAIT: "waiting for its user",
    VictimState.WAIT: "waiting, for what is not known",
    VictimState.SUPERSEDED: "superseded: it had gone another way",
    VictimState.ENDED: "ended",
    VictimState.UNKNOWN: "unknown",
}


class Loss(NamedTuple):
    """Consecutive tokens of one prompt, lost for one reason."""

    cause: Cause
    tokens: int  # negative: hit, though theory does not count it (OVERTAKEN, UNEXPLAINED)
    at: int  # tokens of the prompt before the first of them
    by: EvictedBy | None = None  # known for evictions (EVICTED, HELD, OFFLOAD_LOST), as the fields below
    victim: VictimState | None = None
    culprit: int | None = None  # request that needed the memory, by its index
