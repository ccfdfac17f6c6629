"""Where a turn stops matching its predecessor, and what differs there. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from eval.diagnose.prompt import Kind, Piece, Prompt, common_ids, common_prefix

BEFORE_CHARACTERS = 60  # of the common text, in an excerpt
AFTER_CHARACTERS = 100  # of each side


class Evidence(NamedTuple):
    """What a rule may look at.

    Attributes:
        before: the predecessor's prompt, with its answer where that is known.
        after: the turn's prompt.
        at: characters that both share.
        same_text: the texts agree beyond the first token that differs.
        old_rest: pieces of ``before`` from the one that holds character ``at``; empty where ``before`` ended.
        new_rest: the same of ``after``.
    """

    before: Prompt
    after: Prompt
    at: int
    same_text: bool
    old_rest: tuple[Piece, ...]
    new_rest: tuple[Piece, ...]

    @property
    def old(self) -> Piece | None:
        return self.old_rest[0] if self.old_rest else None

    @property
    def new(self) -> Piece | None:
        return self.new_rest[0] if self.new_rest else None

    def old_from(self, characters: int) -> str:
        return self.before.text[self.at : self.at + characters]

    def new_from(self, characters: int) -> str:
        return self.after.text[self.at : self.at + characters]

    @property
    def old_kind(self) -> Kind | None:
        return None if self.old is None else self.old.kind

    @property
    def new_kind(self) -> Kind | None:
        return None if self.new is None else self.new.kind


class Place(NamedTuple):
    """Where two prompts part.

    Attributes:
        unit: what the three numbers count.
        at: units that both share; also the index of the first that differs.
        before: units of the predecessor, its answer included.
        after: units of the turn.
        shared_text: end of what both share.
        old_text: what the predecessor has there.
        new_text: what the turn has there.
    """

    unit: Literal["token", "character"]
    at: int
    before: int
    after: int
    shared_text: str
    old_text: str
    new_text: str

    @property
    def lost(self) -> int:
        """Units of the predecessor that the turn cannot reuse."""
        return self.before - self.at


def find_divergence(before: Prompt, after: Prompt) -> tuple[Place, Evidence] | None:
    """The first difference, or None where ``after`` begins with all of ``before``.

    Counts tokens where both prompts know theirs, else characters.
    """
    characters = common_prefix(before.text, after.text)
    one, other = before.tokens, after.tokens
    if one is None or other is None:
        if characters == len(before.text):
            return None
        at, same_text = characters, False
        numbers = characters, len(before.text), len(after.text)
    else:
        same = common_ids(one.ids, other.ids)
        if same == len(one.ids):
            return None
        numbers = same, len(one.ids), len(other.ids)
        same_text = characters == len(before.text)
        at = 0 if same_text else characters
        if one.ends is not None and other.ends is not None:
            # Another text also gives another token some characters before the text differs: a change of text.
            beyond = max(_character(one.ends, same + 1), _character(other.ends, same + 1))
            same_text = same_text or characters >= beyond
            at = _character(one.ends, same) if same_text else characters
    shown = max(0, at - BEFORE_CHARACTERS)
    place = Place(
        "character" if one is None or other is None else "token",
        *numbers,
        before.text[shown:at],
        before.text[at : at + AFTER_CHARACTERS],
        after.text[at : at + AFTER_CHARACTERS],
    )
    return place, Evidence(before, after, at, same_text, *rests(before, after, at))


def rests(before: Prompt, after: Prompt, at: int) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
    """The pieces of both from the one that holds character ``at``.

    Where a piece of one side goes on and the other's has just ended, the ended one counts: they are the same piece.
    """
    found = []
    starts = []
    for prompt in (before, after):
        index = bisect_right(prompt.ends, at)
        found.append(index)
        starts.append(at == (prompt.ends[index - 1] if index else 0))
    if starts[0] != starts[1]:
        ended = 0 if starts[0] else 1
        found[ended] = max(0, found[ended] - 1)
    return before.pieces[found[0] :], after.pieces[found[1] :]


def _character(ends: Sequence[int], count: int) -> int:
    """Characters of the first ``count`` tokens."""
    count = min(count, len(ends))
    return ends[count - 1] if count else 0
