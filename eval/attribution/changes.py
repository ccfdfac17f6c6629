"""What clients changed in their own prompts: edits and compactions. They lower the ideal itself and are no part of the
gap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from traces.replay.record import RequestRecord


class Change(NamedTuple):
    """A turn that does not continue its predecessor's prompt."""

    record: RequestRecord
    kind: Literal["edit", "compaction"]  # compaction: the prompt is shorter than the one before
    at: int  # tokens that still match; the change is there, or before
    dropped: int  # tokens of the previous prompt that no longer match, at least


def changes(records: Iterable[RequestRecord]) -> list[Change]:
    """Edits and compactions of all flows, by flow and turn.

    Measured with the longest prefix that *any* earlier request of the session shares, which is at least what the
    predecessor shares: ``dropped`` is a lower bound, and a turn that goes back to an older branch is none.
    """
    flows: dict[tuple[str, str], list[RequestRecord]] = {}
    for record in records:
        flows.setdefault((record.session, record.flow), []).append(record)
    found = []
    for turns in flows.values():
        turns.sort(key=lambda r: r.turn)
        for before, record in pairwise(turns):
            kept = min(record.session_output_lcp, before.prompt_tokens)
            if kept < before.prompt_tokens:
                kind: Literal["edit", "compaction"] = (
                    "compaction" if record.prompt_tokens < before.prompt_tokens else "edit"
                )
                found.append(Change(record, kind, kept, before.prompt_tokens - kept))
    return found


def largest(found: Sequence[Change], count: int) -> list[Change]:
    return sorted(found, key=lambda c: (-c.dropped, c.record.session, c.record.flow, c.record.turn))[:count]
