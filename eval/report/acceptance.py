"""What speculative decoding accepted, of the run and by position. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from eval.report.definitions import definition
from eval.report.schema import Drafting, ReportError
from traces.replay.record import RequestRecord, RunHeader


def acceptance_length(by_drafts: Sequence[int]) -> float:
    """Acceptance length: tokens gained per verification step, 1 + accepted drafts / steps, over the steps of all
    completed requests; the first token of an answer comes from the prefill and is no step. The last step of an answer
    counts whole, even where it went beyond the end.

    ``by_drafts`` holds the number of steps that accepted 0, 1, 2, ... drafts."""
    return 1 + sum(drafts * steps for drafts, steps in enumerate(by_drafts)) / sum(by_drafts)


def acceptance_by_position(by_drafts: Sequence[int], drafts: int) -> list[float]:
    """Acceptance by position: the fraction of verification steps in which the i-th draft was accepted, and with it all
    before it."""
    steps = sum(by_drafts)
    return [sum(by_drafts[position:]) / steps for position in range(1, drafts + 1)]


def drafting(header: RunHeader, completed: Sequence[RequestRecord]) -> Drafting | None:
    """The section of the report; None where nothing was drafted.

    Raises:
        ReportError: a record with a negative number of steps.
    """
    total: Counter[int] = Counter()
    requests = 0
    for record in completed:
        if record.accepted_drafts is None:
            continue
        if any(steps < 0 for steps in record.accepted_drafts):
            raise ReportError(
                f"requests.jsonl, session {record.session}, flow {record.flow}, turn {record.turn}, field "
                "'accepted_drafts': a negative number of steps; remove this record"
            )
        requests += 1
        total.update(dict(enumerate(record.accepted_drafts)))
    steps = total.total()
    server = header.server.speculation
    if server is None and steps == 0:
        return None
    by_drafts = [total[drafts] for drafts in range(max(total, default=0) + 1)]
    drafts = (server.drafts if server else None) or len(by_drafts) - 1
    return Drafting(
        algorithm=server.algorithm if server else "unknown",
        mode=server.mode if server else "unknown",
        asked_length=server.length if server else None,
        drafts=drafts,
        requests=requests,
        steps=steps,
        length=acceptance_length(by_drafts) if steps else None,
        by_position=acceptance_by_position(by_drafts, drafts) if steps else [],
        definition=" ".join(
            definition(function).partition("``by_drafts``")[0].strip()
            for function in (acceptance_length, acceptance_by_position)
        ),
    )
