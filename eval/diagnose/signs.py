"""What a divergence looks like: one predicate a rule of ``rules.py``, and what they share. Pure."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import orjson

from eval.diagnose.divergence import Evidence
from eval.diagnose.prompt import THINK_CLOSINGS, THINK_OPENINGS, Kind, Piece

WINDOW = 48  # characters that are compared behind a difference
_AROUND = 40  # characters to both sides in which a time or an id may begin and end


def retokenised(e: Evidence) -> bool:
    return e.same_text


def _kinds(e: Evidence, kind: Kind) -> bool:
    return e.old_kind is kind and e.new_kind is kind


def tools_reordered(e: Evidence) -> bool:
    return _kinds(e, Kind.TOOLS) and _same_parts(_of_kind(e, Kind.TOOLS))


def tools_key_order(e: Evidence) -> bool:
    old, new = _of_kind(e, Kind.TOOLS)
    return _kinds(e, Kind.TOOLS) and Counter(_squeezed(old)) == Counter(_squeezed(new))


def tools_changed(e: Evidence) -> bool:
    return Kind.TOOLS in (e.old_kind, e.new_kind)


_TIME = re.compile(
    r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"
    r"|\b\d{1,2}:\d{2}(?::\d{2})?(?: ?[AaPp][Mm])?\b"
    r"|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b"
    r"|\b(?:\d{1,2} )?(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,4}(?:, \d{4})?"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*day\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?(?:\.\d+)?\b"  # seconds or milliseconds since 1970
)
_ID = re.compile(
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?=[0-9a-zA-Z_-]*\d)[0-9a-zA-Z]+(?:[_-][0-9a-zA-Z]+)*\b"
)
_SHORTEST_ID = 5
_SHORTEST_MESSAGE = 16  # characters; shorter texts are found again by chance


def _matches_at(pattern: re.Pattern[str], text: str, at: int) -> str | None:
    """What ``pattern`` finds in ``text`` across or right at character ``at``."""
    start = max(0, at - _AROUND)
    window = text[start : at + _AROUND]
    return next((m[0] for m in pattern.finditer(window) if m.start() <= at - start < m.end()), None)


def _both_match(e: Evidence, pattern: re.Pattern[str]) -> tuple[str, str] | None:
    old, new = _matches_at(pattern, e.before.text, e.at), _matches_at(pattern, e.after.text, e.at)
    return (old, new) if old is not None and new is not None and old != new else None


def _goes_on_alike(e: Evidence, old: str, new: str) -> bool:
    """Behind the two values the texts are the same again: only the value changed."""
    rest = []
    for prompt, value in ((e.before, old), (e.after, new)):
        start = prompt.text.rfind(value, max(0, e.at - _AROUND), e.at + len(value))
        rest.append(prompt.text[start + len(value) :][:WINDOW])
    shorter = min(len(rest[0]), len(rest[1]))
    return rest[0][:shorter] == rest[1][:shorter]


def timestamp(e: Evidence) -> bool:
    return _both_match(e, _TIME) is not None


def nonce(e: Evidence) -> bool:
    found = _both_match(e, _ID)
    return (
        found is not None
        and min(map(len, found)) >= _SHORTEST_ID
        and _goes_on_alike(e, *found)
        and e.old_kind is e.new_kind
        and e.old_kind is not Kind.THINK
    )


def truncated(e: Evidence) -> bool:
    """What the turn goes on with is a later message of the predecessor: something between was left out."""
    return _later(e.new_rest, e.old_rest)


def inserted(e: Evidence) -> bool:
    """What the predecessor went on with comes in a later message of the turn: messages were put in between."""
    return _later(e.old_rest, e.new_rest)


def _later(one: tuple[Piece, ...], other: tuple[Piece, ...]) -> bool:
    """The first text of ``one`` stands, whole, in a later message of ``other``."""
    first = _text(one)
    if first is None or len(first.text) < _SHORTEST_MESSAGE:
        return False
    return any(p.message > first.message and p.kind is first.kind and p.text == first.text for p in other)


def _text(pieces: tuple[Piece, ...]) -> Piece | None:
    """The first piece that is no marker."""
    return next((piece for piece in pieces if piece.kind is not Kind.MARK), None)


def system_changed(e: Evidence) -> bool:
    return Kind.SYSTEM in (e.old_kind, e.new_kind)


def _thought(e: Evidence) -> str:
    """The reasoning of the predecessor's think block at the divergence, without its tags."""
    text = e.old.text if e.old is not None and e.old.kind is Kind.THINK else ""
    for tag in (*THINK_OPENINGS, *THINK_CLOSINGS):
        text = text.replace(tag, "")
    return text.strip()


def think_as_content(e: Evidence) -> bool:
    """The reasoning itself goes on as the answer's text, within the same message."""
    thought = _thought(e)
    return bool(thought) and e.new_kind is Kind.ANSWER and thought[:WINDOW] in e.new_from(len(thought) + WINDOW)


def stray_tag(e: Evidence) -> bool:
    """An answer begins with the closing tag of a think block that it does not open, on one side only."""

    def stray(text: str, kind: Kind | None) -> bool:
        return kind is Kind.ANSWER and text.lstrip().startswith(THINK_CLOSINGS)

    return stray(e.old_from(WINDOW), e.old_kind) != stray(e.new_from(WINDOW), e.new_kind)


def template_without_reasoning(e: Evidence) -> bool:
    return think_dropped(e) and _thought(e) in e.after.reasoning_sent


def think_dropped(e: Evidence) -> bool:
    return e.old_kind is Kind.THINK and e.new_kind is not Kind.THINK


def think_inserted(e: Evidence) -> bool:
    return e.new_kind is Kind.THINK and e.old_kind is not Kind.THINK


def think_changed(e: Evidence) -> bool:
    return _kinds(e, Kind.THINK)


def argument_order(e: Evidence) -> bool:
    return _kinds(e, Kind.CALL) and _permuted(*_at(e))


def argument_spacing(e: Evidence) -> bool:
    old, new = _at(e)
    return _kinds(e, Kind.CALL) and _squeezed(old) == _squeezed(new)


def call_changed(e: Evidence) -> bool:
    return _kinds(e, Kind.CALL)


_CLEARED = re.compile(r"cleared|omitted|truncated|elided|removed|compressed|\[\.\.\.\]", re.IGNORECASE)


def result_cleared(e: Evidence) -> bool:
    old, new = _at(e)
    return _kinds(e, Kind.RESULT) and (bool(_CLEARED.search(new)) or len(new) < len(old))


_SUMMARY = re.compile(r"summar|continued from a previous|compact|condensed|so far", re.IGNORECASE)


def compacted(e: Evidence) -> bool:
    return e.after.compacted or (
        len(e.after.text) < len(e.before.text)
        and e.new_kind in (Kind.USER, Kind.SYSTEM)
        and bool(_SUMMARY.search(e.new_from(400)))
    )


def answer_left_out(e: Evidence) -> bool:
    """The predecessor's answer is not there at all: a user message or nothing stands in its place."""
    old, new = _text(e.old_rest), _text(e.new_rest)
    return (
        old is not None
        and old.kind in (Kind.ANSWER, Kind.THINK, Kind.CALL)
        and (new is None or new.kind in (Kind.USER, Kind.RESULT, Kind.SYSTEM))
    )


def spacing(e: Evidence) -> bool:
    old, new = e.old_from(2 * WINDOW), e.new_from(2 * WINDOW)
    spaces = old[:1].isspace() != new[:1].isspace()
    return spaces and old.lstrip()[:WINDOW] == new.lstrip()[:WINDOW]


def user_changed(e: Evidence) -> bool:
    """A user message differs, and the same messages follow it."""
    if not _kinds(e, Kind.USER):
        return False
    old, new = _text(_behind(e.old_rest)), _text(_behind(e.new_rest))
    return old is not None and new is not None and (old.kind, old.text) == (new.kind, new.text)


def _behind(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces of later messages."""
    return tuple(piece for piece in pieces if piece.message > pieces[0].message)


def rewound(e: Evidence) -> bool:
    old, new = _text(e.old_rest), _text(e.new_rest)
    return new is None or (new.kind is Kind.USER and old is not None and old.kind is Kind.USER)


def answer_changed(e: Evidence) -> bool:
    return Kind.ANSWER in (e.old_kind, e.new_kind)


def _at(e: Evidence) -> tuple[str, str]:
    """Texts of the two pieces at the divergence."""
    return "" if e.old is None else e.old.text, "" if e.new is None else e.new.text


def _of_kind(e: Evidence, kind: Kind) -> tuple[str, str]:
    """All text of a kind in both prompts."""
    old, new = (
        "\n".join(piece.text for piece in prompt.pieces if piece.kind is kind) for prompt in (e.before, e.after)
    )
    return old, new


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _permuted(old: str, new: str) -> bool:
    """Equal JSON, or the same characters in another order."""
    one, other = _json(old), _json(new)
    if one is not None and one == other:
        return _squeezed(old) != _squeezed(new)
    one_text, other_text = _squeezed(old), _squeezed(new)
    return one_text != other_text and Counter(one_text) == Counter(other_text)


def _same_parts(texts: tuple[str, str]) -> bool:
    """The same lines (one tool a line) in another order."""
    old, new = (Counter(line.strip() for line in text.splitlines() if line.strip()) for text in texts)
    return old == new and texts[0] != texts[1]


def _json(text: str) -> Any:
    start = text.find("{")
    try:
        return orjson.loads(text[start : text.rfind("}") + 1]) if start >= 0 else None
    except orjson.JSONDecodeError:
        return None
