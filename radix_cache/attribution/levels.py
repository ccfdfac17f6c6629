"""The chain of levels of one request, in tokens: from ideal to realized, exactly.

Each level is a prefix length; a loss is the difference of two neighbours. What no evidence accounts for is what is
left over: it becomes ``UNEXPLAINED`` and is never spread over the other causes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from radix_cache.attribution.causes import Cause, Loss
from radix_cache.rates import hit_tokens


class Lengths(NamedTuple):
    """One request, in tokens; prefixes at page size 1 and not capped, as ``docs/definitions.md`` defines them."""

    prompt: int
    shared: int  # longest common prefix with earlier prompts and answers of all sessions
    session: int  # the same, own session only
    realized: int  # cached tokens, as the server reported them


class CacheKind(NamedTuple):
    """What a cache can hit at best."""

    page_size: int = 1
    scope: Literal["shared", "session"] = "shared"
    pair_keys: bool = False  # EAGLE: keyed by pairs of neighbouring tokens


class Attribution(NamedTuple):
    """One request's gap with its causes; ``sum(loss.tokens) == ideal - realized``, always."""

    ideal: int
    aligned: int  # the most that this cache could hit
    realized: int
    losses: tuple[Loss, ...]

    @property
    def gap(self) -> int:
        return self.ideal - self.realized


def reachable(lengths: Lengths, cache: CacheKind) -> int:
    """Tokens that the cache can hit at best: its scope, whole pages, its key."""
    prefix = lengths.shared if cache.scope == "shared" else min(lengths.session, lengths.shared)
    prefix = min(prefix, lengths.prompt - 1)
    if cache.pair_keys:
        # n tokens have n - 1 pairs, of the prompt's part that may hit.
        prefix = max(0, prefix - 1)
    return prefix // cache.page_size * cache.page_size


def attribute(lengths: Lengths, cache: CacheKind, found: Sequence[Loss] = ()) -> Attribution:
    """Give every token between ideal and realized one cause.

    Args:
        lengths: the request.
        cache: what kind of cache served it.
        found: losses between ``realized`` and ``reachable``, from evidence, each token at most once.
    """
    ideal = hit_tokens(lengths.shared, lengths.prompt, 1)
    scoped = min(ideal, lengths.session) if cache.scope == "session" else ideal
    aligned = scoped // cache.page_size * cache.page_size
    best = reachable(lengths, cache)
    steps = [
        Loss(Cause.NOT_SHARED, ideal - scoped, scoped),
        Loss(Cause.PAGE_ALIGNMENT, scoped - aligned, aligned),
        Loss(Cause.SPECULATION_KEY, aligned - best, best),
        *found,
    ]
    left = best - lengths.realized - sum(loss.tokens for loss in found)
    steps.append(Loss(Cause.UNEXPLAINED, left, min(best, lengths.realized)))
    return Attribution(ideal, best, lengths.realized, tuple(loss for loss in steps if loss.tokens))


def without_events(lengths: Lengths, cache: CacheKind, ready: int) -> Attribution:
    """What can be said of a request without cache events.

    Sound is: tokens beyond ``ready`` (the longest common prefix with what had been computed when the request was sent)
    had not been computed. The others had; why they are gone stays open (``NOT_OBSERVED``).
    """
    best, start = reachable(lengths, cache), lengths.realized
    computed = reachable(lengths._replace(shared=min(ready, lengths.shared)), cache)
    split = min(max(computed, start), best)
    found = []
    if start < split:
        found.append(Loss(Cause.NOT_OBSERVED, split - start, start))
    if max(split, start) < best:
        found.append(Loss(Cause.IN_FLIGHT, best - split, split))
    return attribute(lengths, cache, found)
