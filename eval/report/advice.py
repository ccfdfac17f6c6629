"""The report's answer in a few sentences: what cost most, what to do about it, and what that would bring. Pure.

Nothing is found out here: the largest cause is the attribution's, the gains are the simulator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eval.report.schema import Report
from eval.report.schema_causes import AttributionReport, LargestCause
from eval.report.schema_what_if import Answer, WhatIf
from eval.report.text import count, percent, points
from eval.report.text_what_if import UNLIKE, answers, memory
from radix_cache.attribution.causes import Cause

_WORTH_NAMING = 0.001  # of the hit rate; less is not worth a change
_NO_SERVER = "belady"

REMEDIES: dict[Cause, str] = {
    Cause.NOT_SHARED: "let sessions share one cache, if their data may meet",
    Cause.PAGE_ALIGNMENT: (
        "little, unless the kernels allow a smaller page: half a page a prompt is lost on average, which weighs less"
        " the longer prompts are"
    ),
    Cause.SPECULATION_KEY: "serve with --eagle3, whose cache is keyed by single tokens",
    Cause.IN_FLIGHT: "send one request of a common prefix first, and the others when it has its first token",
    Cause.NOT_ADMITTED: "more memory, since the cache never took these tokens, or a gate, so that fewer sessions start",
    Cause.EVICTED: "more memory, another eviction policy, session admission or a host tier",
    Cause.HELD: "a looser admission gate, or a policy that knows what is held",
    Cause.OFFLOAD_LOST: "a larger offload tier",
    Cause.OFFLOAD_REFUSED: "see the daemon's log: it was away, or returned what was not stored; the audit counts both",
    Cause.RESTORED_LATE: "a faster offload tier, or a longer deadline where a load is still faster than to compute",
    Cause.NOT_RESTORED: "serve without --incremental-streaming-output, so that answers say why",
    Cause.NOT_OBSERVED: "serve with --kv-events 'tcp://*:5557' and replay again: then the report tells which it was",
    Cause.UNEXPLAINED: "look at gaps in the cache events, and at requests whose count cannot be",
}

_MEMORY = (Cause.NOT_ADMITTED, Cause.EVICTED, Cause.HELD, Cause.OFFLOAD_LOST, Cause.NOT_OBSERVED)


def advice(report: Report) -> list[str]:
    """What cost most and what to do; empty where nothing was lost or nobody counted."""
    why = report.attribution
    if why is None:
        return []
    if why.largest is None:
        return ["Nothing was lost: there is nothing to do."]
    return list(_sentences(why, why.largest, report.what_if))


def _sentences(why: AttributionReport, largest: LargestCause, simulated: WhatIf | None) -> Iterator[str]:
    cost = f"{count(largest.tokens)} tokens, {100 * largest.tokens / why.prompt_tokens:.2f} points"
    if largest.kind == "context_change":
        remedy = next((row.remedy for row in why.context_changes.by_cause if row.cause == largest.cause), "")
        yield f"Largest loss: clients changed their own prompts: {largest.title} ({cost})."
        if remedy:
            yield f"What to do: {remedy}."
        return
    cause, ideal = Cause(largest.cause), why.ideal_tokens / why.prompt_tokens
    gap = f"the {100 * why.gap_tokens / why.prompt_tokens:.2f} below the ideal"
    yield f"Largest cause: {largest.title} ({cost} of {gap} {percent(ideal)}){_whose(why, cause)}."
    if cause in REMEDIES:
        yield f"What to do: {REMEDIES[cause]}."
    if cause in _MEMORY and simulated is not None:
        yield from _gains(simulated)


def _whose(why: AttributionReport, cause: Cause) -> str:
    rows = [row for row in why.evictions if row.cause == cause.value]
    if not rows:
        return ""
    most = max(rows, key=lambda row: row.tokens)
    return f", mostly for {most.by_title}; the conversation that lost it: {most.victim_title}"


def _gains(found: WhatIf) -> Iterator[str]:
    """The best change without more memory, and the one that brings most for memory."""
    real = [a for a in answers(found) if a.policy != _NO_SERVER and a.difference >= _WORTH_NAMING]
    free = [a for a in real if _added(a, found) == 0]
    paid = [a for a in real if _added(a, found) > 0]
    best: Sequence[Answer] = [max(some, key=lambda a: a.difference) for some in (free, paid) if some]
    if not best:
        return
    told = "; ".join(
        f"{a.question} {points(a.difference)} points"
        + (f" for {memory(_added(a, found), a.more_bytes)}" if _added(a, found) else "")
        for a in best
    )
    simulated, realized = found.simulated_rate, found.realized_rate
    off = 0.0 if simulated is None or realized is None else simulated - realized
    doubt = f" (it is {points(off)} points off for this run's own setting)" if abs(off) >= UNLIKE else ""
    yield f"By the simulator{doubt}: {told}."


def _added(answer: Answer, found: WhatIf) -> int:
    return answer.capacity_tokens - (found.capacity_tokens or 0) + answer.host_tokens
