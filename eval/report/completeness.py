"""How much of the planned run was recorded, and what is missing. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from eval.report.schema import Completeness, Status
from traces.replay.record import RequestRecord, RunEvent, RunHeader

_WHAT_HAPPENED: dict[Status, str] = {
    "finished": "The run finished",
    "interrupted": "The run was interrupted",
    "server_lost": "The server was lost during the run",
    "incomplete": "The run did not finish (it was killed, or is still running)",
}


def status_of(events: Sequence[RunEvent]) -> Status:
    """How the last attempt (since the last start or resume) ended."""
    kinds: set[str] = set()
    for event in events:
        if event.kind in ("started", "resumed"):
            kinds.clear()
        kinds.add(event.kind)
    if "server_lost" in kinds:
        return "server_lost"
    if "interrupted" in kinds:
        return "interrupted"
    return "finished" if "finished" in kinds else "incomplete"


def completeness(header: RunHeader, records: Sequence[RequestRecord], events: Sequence[RunEvent]) -> Completeness:
    """Counts planned, recorded, failed, dropped and missing requests, and words a banner."""
    failed = sum(1 for r in records if r.error is not None)
    # Dropped turns were left out before the run: they are no part of the planned requests.
    dropped = sum(1 if e.requests is None else e.requests for e in events if e.kind == "dropped")
    missing = max(0, header.requests - len(records))
    status = status_of(events)
    banner = None
    if status != "finished" or missing:
        last = max(r.done_s for r in records)
        why = next((e.message for e in reversed(events) if e.kind in ("server_lost", "interrupted")), "")
        reason = f" ({why})" if why and status in ("server_lost", "interrupted") else ""
        banner = (
            f"{_WHAT_HAPPENED[status]}{reason}: {missing:,} of {header.requests:,} planned requests are"
            f" missing ({len(records):,} recorded, {failed:,} of them failed). The last record ends"
            f" {last:,.1f} s after the start. Every number below is about the recorded part only."
        )
    return Completeness(
        status=status,
        banner=banner,
        planned=header.requests,
        recorded=len(records),
        completed=len(records) - failed,
        failed=failed,
        dropped=dropped,
        missing=missing,
    )
