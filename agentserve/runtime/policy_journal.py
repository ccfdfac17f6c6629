"""What the policies saw, in order: a JSON line an event, to hold a server against the simulator. Off unless asked for.

``AGENTSERVE_JOURNAL=FILE`` in the server's environment (``env`` of a recipe) turns it on; nothing of a prompt is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal, NamedTuple

JOURNAL_VARIABLE = "AGENTSERVE_JOURNAL"

# What a request does in its life: it arrives; at each look at the queue it is matched; its prefill starts, and each
# chunk takes memory up to some token (prefill); what was computed is kept in the tree (keep); each decode step takes a
# token more; it finishes, or gives its memory back without (release: retracted or aborted) and is matched again.
# What happens to the cache besides: a conversation ends, a victim is evicted.
Kind = Literal["arrive", "match", "start", "prefill", "keep", "decode", "release", "finish", "end", "evict"]


class JournalEvent(NamedTuple):
    """One event.

    Attributes:
        at_s: the cache's clock, in seconds; what one step of the scheduler allocates has one time.
        conversation: id of the flow, as the client named it or as it was inferred.
        tokens: match: tokens that may hit at most; start: prompt tokens that were cached; prefill: end of the chunk,
            counted from the prompt's begin; keep, finish: tokens that the tree was given; evict: tokens that went;
            else 0.
    """

    at_s: float
    kind: Kind
    conversation: str
    tokens: int = 0


class Journal:
    """Appends events to a file, each flushed whole; does nothing without a path."""

    def __init__(self, path: str | None) -> None:
        # Open for as long as the server lives.
        self._file: IO[str] | None = Path(path).open("a", buffering=1) if path else None  # noqa: SIM115

    def note(self, kind: Kind, conversation: str, now: float, tokens: int = 0) -> None:
        if self._file is not None:
            self._file.write(json.dumps(JournalEvent(now, kind, conversation, tokens)) + "\n")


def read_journal(path: Path) -> Iterator[JournalEvent]:
    """The events of a journal, in order.

    Raises:
        ValueError: a line that is no event; names file and line.
    """
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                at_s, kind, conversation, tokens = json.loads(line)
                yield JournalEvent(float(at_s), kind, str(conversation), int(tokens))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: not an event of a policy journal ({error}); is it another file?"
                ) from error
