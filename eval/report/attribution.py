"""Causes of single requests, summed up for a report. Pure; the sums are exact in tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence

from eval.attribution.changes import Change, changes, largest
from eval.attribution.live import attribute_with_events, attribute_without_events
from eval.report.schema_causes import (
    AttributionReport,
    CauseRow,
    ChangeCause,
    ContextChange,
    ContextChanges,
    DepthCauses,
    EventEvidence,
    EvictionRow,
    EvictorRow,
    LargestCause,
    RealizedByTier,
    SessionCauses,
)
from radix_cache.attribution import Attribution, CacheKind, Cause, EvictedBy, VictimState
from radix_cache.attribution.causes import BY_TITLES, DEFINITIONS, STATE_TITLES, TITLES
from traces.replay.events import KvEvents, pair_keys
from traces.replay.record import RequestRecord, RunHeader
from traces.replay.store import TurnKey

DEPTHS = (0, 1_024, 4_096, 16_384, 65_536, 262_144)  # first tokens of the ranges of depth
CHANGES_LISTED = 50
_EVICTIONS = (Cause.EVICTED, Cause.OFFLOAD_LOST)


def attribution(
    header: RunHeader,
    records: Sequence[RequestRecord],
    compared: Sequence[RequestRecord],
    page_size: int,
    events: KvEvents | None,
    texts: Mapping[TurnKey, str] | None = None,
) -> AttributionReport:
    """Explains the gap of a run.

    Args:
        header: of the run.
        records: all of it.
        compared: requests with a cached-token count, at least one.
        page_size: tokens per page that the report's theory is about.
        events: the run's cache events, if any were recorded; used only where they are about pages of that size.
        texts: prompts as text where they are known, to name why clients' prompts changed.
    """
    usable = events if events is not None and events.batches and events.header.page_size == page_size else None
    pairs = usable.header.pair_keys if usable is not None else pair_keys(header.server)
    cache = CacheKind(page_size, "shared", pairs)
    if usable is None:
        found = attribute_without_events(compared, cache)
    else:
        found = attribute_with_events(records, compared, usable, cache)
    evidence = _evidence(events, usable)
    return summed(compared, found, records, evidence, texts)


def summed(
    compared: Sequence[RequestRecord],
    found: Sequence[Attribution],
    records: Sequence[RequestRecord],
    evidence: EventEvidence,
    texts: Mapping[TurnKey, str] | None = None,
) -> AttributionReport:
    """The report's part from each request's causes; ``found`` belongs to ``compared`` one by one."""
    prompt = sum(r.prompt_tokens for r in compared)
    gap = sum(one.gap for one in found)
    left = sum(abs(loss.tokens) for one in found for loss in one.losses if loss.cause is Cause.UNEXPLAINED)
    causes = _causes(found, prompt)
    changed = _changes([r for r in records if r.error is None], texts)
    return AttributionReport(
        evidence=evidence,
        prompt_tokens=prompt,
        ideal_tokens=sum(one.ideal for one in found),
        realized_tokens=sum(one.realized for one in found),
        realized_by_tier=_by_tier(compared),
        gap_tokens=gap,
        unexplained_tokens=left,
        unexplained_fraction=left / gap if gap > 0 else (0.0 if not left else 1.0),
        causes=causes,
        evictions=_evictions(found),
        evictors=_evictors(compared, found, records),
        by_session=_by_session(compared, found),
        by_depth=_by_depth(found),
        context_changes=changed,
        largest=_largest(causes, changed),
    )


def _by_tier(compared: Sequence[RequestRecord]) -> RealizedByTier:
    host, storage = sum(r.cached_host or 0 for r in compared), sum(r.cached_storage or 0 for r in compared)
    return RealizedByTier(
        device=sum(r.cached_tokens or 0 for r in compared) - host - storage, host=host, storage=storage
    )


def _evidence(events: KvEvents | None, used: KvEvents | None) -> EventEvidence:
    if events is None:
        return EventEvidence(
            kind="none",
            text="No cache events were recorded, so what was computed before and is gone cannot be told apart: evicted,"
            " never admitted, or lost in an offload tier. The other causes are sound. Serve with --kv-events and"
            " replay again to know.",
        )
    lost = sum(gap.batches or 0 for gap in events.gaps)
    facts = {"batches": len(events.batches), "gaps": len(events.gaps), "lost_batches": lost}
    if not events.batches:
        return EventEvidence(
            kind="none",
            text=f"Cache events were asked for, but none came from {events.header.endpoint}: check that the server"
            " publishes there and that the port can be reached. A server that `agentserve launch` did not start must"
            ' have an endpoint tcp://*:PORT, or "bind": true: for any other host SGLang connects instead of listening.'
            " Only what is sound without them is told apart.",
            **facts,
        )
    if used is None:
        return EventEvidence(
            kind="none",
            text=f"The recorded cache events are about pages of {events.header.page_size} tokens, so they say nothing"
            " about the page size that was asked for.",
            **facts,
        )
    text = f"From {len(events.batches):,} batches of cache events, without a gap in their numbers."
    if events.gaps:
        first = events.gaps[0]
        text = (
            f"From {len(events.batches):,} batches of cache events, with {len(events.gaps):,} gaps ({lost:,} batches"
            f" lost), the first after {first.after_s:.1f} s ({first.why}): what follows a gap may be unexplained."
        )
    if not events.header.emptied:
        text += " The cache was not seen to be empty at the start: what it held before is unknown."
    return EventEvidence(kind="events", text=text, **facts)


def _causes(found: Sequence[Attribution], prompt: int) -> list[CauseRow]:
    rows = []
    for cause in Cause:
        tokens = [loss.tokens for one in found for loss in one.losses if loss.cause is cause]
        if not tokens and cause is not Cause.UNEXPLAINED:
            continue
        lost = sum(t for t in tokens if t > 0)
        gained = -sum(t for t in tokens if t < 0)
        rows.append(
            CauseRow(
                cause=cause.value,
                title=TITLES[cause],
                definition=DEFINITIONS[cause],
                tokens=lost - gained,
                lost_tokens=lost,
                gained_tokens=gained,
                requests=sum(any(loss.cause is cause for loss in one.losses) for one in found),
                rate_difference=(lost - gained) / prompt,
            )
        )
    return rows


def _evictions(found: Sequence[Attribution]) -> list[EvictionRow]:
    tokens: Counter[tuple[Cause, EvictedBy, VictimState]] = Counter()
    for one in found:
        for loss in one.losses:
            if loss.cause in _EVICTIONS and loss.by is not None and loss.victim is not None:
                tokens[loss.cause, loss.by, loss.victim] += loss.tokens
    return [
        EvictionRow(
            cause=cause.value,
            by=by.value,
            by_title=BY_TITLES[by],
            victim=victim.value,
            victim_title=STATE_TITLES[victim],
            tokens=count,
        )
        for (cause, by, victim), count in tokens.most_common()
    ]


def _evictors(
    compared: Sequence[RequestRecord], found: Sequence[Attribution], records: Sequence[RequestRecord]
) -> list[EvictorRow]:
    """Whose requests took the memory: each session's own losses apart from what it cost others."""
    others: Counter[str] = Counter()
    itself: Counter[str] = Counter()
    for record, one in zip(compared, found, strict=True):
        for loss in one.losses:
            if loss.culprit is not None:
                session = records[loss.culprit].session
                (itself if session == record.session else others)[session] += loss.tokens
    rows = [
        EvictorRow(session=session, tokens_of_others=others[session], tokens_of_itself=itself[session])
        for session in others.keys() | itself.keys()
    ]
    return sorted(rows, key=lambda row: (-row.tokens_of_others - row.tokens_of_itself, row.session))


def _by_session(compared: Sequence[RequestRecord], found: Sequence[Attribution]) -> list[SessionCauses]:
    tokens: dict[str, Counter[str]] = {}
    for record, one in zip(compared, found, strict=True):
        own = tokens.setdefault(record.session, Counter())
        for loss in one.losses:
            own[loss.cause.value] += loss.tokens
    rows = [SessionCauses(session=s, gap_tokens=sum(own.values()), causes=dict(own)) for s, own in tokens.items()]
    return sorted(rows, key=lambda row: (-row.gap_tokens, row.session))


def _by_depth(found: Sequence[Attribution]) -> list[DepthCauses]:
    tokens: list[Counter[str]] = [Counter() for _ in DEPTHS]
    edges = [*DEPTHS[1:], 1 << 62]
    for one in found:
        for loss in one.losses:
            if loss.tokens < 0:
                tokens[bisect_right(DEPTHS, loss.at) - 1][loss.cause.value] += loss.tokens
                continue
            at, end = loss.at, loss.at + loss.tokens
            while at < end:
                bin_ = bisect_right(DEPTHS, at) - 1
                stop = min(end, edges[bin_])
                tokens[bin_][loss.cause.value] += stop - at
                at = stop
    return [
        DepthCauses(from_token=start, to_token=None if end == edges[-1] else end, causes=dict(own))
        for start, end, own in zip(DEPTHS, edges, tokens, strict=True)
        if own
    ]


def _largest(causes: Sequence[CauseRow], changed: ContextChanges) -> LargestCause | None:
    gap = [LargestCause(kind="gap", cause=row.cause, title=row.title, tokens=row.tokens) for row in causes]
    edits = [
        LargestCause(kind="context_change", cause=row.cause, title=row.title, tokens=row.lost_tokens)
        for row in changed.by_cause
    ]
    found = max([*gap, *edits], key=lambda row: row.tokens)
    return found if found.tokens > 0 else None


def _by_cause(found: Sequence[Change]) -> list[ChangeCause]:
    groups: dict[str, list[Change]] = {}
    for change in found:
        groups.setdefault("unknown" if change.why is None else change.why.cause, []).append(change)
    rows = [
        ChangeCause(
            cause=cause,
            title="a changed prompt, whose text is not known" if (why := group[0].why) is None else why.title,
            remedy="" if why is None else why.remedy,
            changes=len(group),
            lost_tokens=sum(change.lost for change in group),
        )
        for cause, group in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.lost_tokens, row.cause))


def _changes(completed: Sequence[RequestRecord], texts: Mapping[TurnKey, str] | None) -> ContextChanges:
    found = changes(completed, texts)
    return ContextChanges(
        edits=sum(c.kind == "edit" for c in found),
        compactions=sum(c.kind == "compaction" for c in found),
        dropped_tokens=sum(c.dropped for c in found),
        lost_tokens=sum(c.lost for c in found),
        by_cause=_by_cause(found),
        largest=[
            ContextChange(
                session=c.record.session,
                flow=c.record.flow,
                turn=c.record.turn,
                kind=c.kind,
                at_token=c.at,
                dropped_tokens=c.dropped,
                lost_tokens=c.lost,
                cause=None if c.why is None else c.why.cause,
                cause_title="" if c.why is None else c.why.title,
            )
            for c in largest(found, CHANGES_LISTED)
        ],
    )
