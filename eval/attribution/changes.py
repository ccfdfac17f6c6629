"""What clients changed in their own prompts: edits and compactions. They lower the ideal itself and are no part of the
gap. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from eval.diagnose import Break, diagnose
from traces.replay.record import RequestRecord
from traces.replay.store import TurnKey, key_of


class Change(NamedTuple):
    """A turn that does not continue its predecessor's prompt."""

    record: RequestRecord
    kind: Literal["edit", "compaction"]  # compaction: the prompt is shorter than the one before
    at: int  # tokens that still match; the change is there, or before
    dropped: int  # tokens of the previous prompt that no longer match, at least
    lost: int  # tokens of this prompt that would have hit, had the client left the previous one as it was
    why: Break | None = None  # from the two texts, where they are known


def changes(records: Iterable[RequestRecord], texts: Mapping[TurnKey, str] | None = None) -> list[Change]:
    """Edits and compactions of all flows, by flow and turn.

    Measured with the longest prefix that *any* earlier request of the session shares, which is at least what the
    predecessor shares: ``dropped`` is a lower bound, and a turn that goes back to an older branch is none.

    Args:
        records: of completed requests.
        texts: prompts as text, by (session, flow, turn), where they are known: from them follows the probable cause.
    """
    texts = texts or {}
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
                old, new = texts.get(key_of(before)), texts.get(key_of(record))
                why = None if old is None or new is None else diagnose(old, new)
                found.append(Change(record, kind, kept, before.prompt_tokens - kept, _lost(before, record), why))
    return found


def _lost(before: RequestRecord, record: RequestRecord) -> int:
    """The last token of a prompt is always computed, so it cannot be lost."""
    can_hit = record.prompt_tokens - 1
    return max(0, min(before.prompt_tokens, can_hit) - min(record.shared_output_lcp, can_hit))


def largest(found: Sequence[Change], count: int) -> list[Change]:
    return sorted(found, key=lambda c: (-c.dropped, c.record.session, c.record.flow, c.record.turn))[:count]
