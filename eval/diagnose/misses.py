"""Turns whose text continues their predecessor's, and yet the server counted fewer cached tokens. Pure.

The text cannot say why; what else the log says can: another model, a long pause, parts of the prompt not logged.
Another cause is one more ``MissRule``; the first that applies is named, the last one always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eval.diagnose.chat import Call

TOLERANCE = 0.05  # of the predecessor's prompt: a page or two, and markers that a template moves
_LEAST = 256  # tokens, the same for short prompts
PAUSE_S = 300.0  # hosted caches keep a prefix for five minutes


class MissEvidence(NamedTuple):
    """What the log says of two calls whose texts agree."""

    before: Call
    after: Call
    expected: int  # tokens of the predecessor's prompt
    cached: int

    @property
    def pause_s(self) -> float | None:
        if self.before.at_s is None or self.after.at_s is None:
            return None
        return self.after.at_s - self.before.at_s


class MissRule(NamedTuple):
    """One probable cause."""

    name: str
    title: str
    applies: Callable[[MissEvidence], bool]
    remedy: str


def _overlaps(e: MissEvidence) -> bool:
    return e.pause_s is not None and e.pause_s < 1.0


MISS_RULES: tuple[MissRule, ...] = (
    MissRule(
        "other_model",
        "another model was asked",
        lambda e: bool(e.before.model) and bool(e.after.model) and e.before.model != e.after.model,
        "each model has a cache of its own: stay with one in a conversation",
    ),
    MissRule(
        "sent_at_once",
        "sent while its predecessor still ran",
        _overlaps,
        "wait for the first token of a request before sending others with the same prefix",
    ),
    MissRule(
        "pause",
        "a long pause came before it",
        lambda e: e.pause_s is not None and e.pause_s >= PAUSE_S,
        "the prefix was dropped or evicted while it waited: more memory, an offload tier, or a policy that keeps it",
    ),
    MissRule(
        "never_counted",
        "the server counted no cached token",
        lambda e: e.cached == 0,
        "the prefix cache is off, the server does not report it (SGLang: --enable-cache-report), or tools or system "
        "prompt, which some logs lack, changed; see /metrics of the server",
    ),
    MissRule(
        "evicted_or_unlogged",
        "the cache did not have it",
        lambda e: True,
        "it was evicted, or a part of the prompt that is not in the log changed: record a run with cache events "
        "(agentserve replay) to tell them apart",
    ),
)


class Miss(NamedTuple):
    """A turn that continues its predecessor's text, of which the server had less than it could."""

    cause: str
    title: str
    remedy: str
    expected: int
    cached: int


def find_miss(before: Call, after: Call) -> Miss | None:
    """None where the server had what it could have, or where the log does not count."""
    if before.prompt_tokens is None or after.prompt_tokens is None or after.cached_tokens is None:
        return None
    expected = min(before.prompt_tokens, after.prompt_tokens - 1)
    if expected - after.cached_tokens <= max(_LEAST, int(expected * TOLERANCE)):
        return None
    evidence = MissEvidence(before, after, expected, after.cached_tokens)
    rule = next(rule for rule in MISS_RULES if rule.applies(evidence))
    return Miss(rule.name, rule.title, rule.remedy, expected, after.cached_tokens)
