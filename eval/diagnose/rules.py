"""Probable causes of a broken prefix: one entry a rule, the first that applies is named. Pure.

Another cause is one more ``Rule`` in ``RULES``: a name, a sentence, a predicate on the ``Evidence``, and what to do.
Rules that ask for more evidence stand before those that ask for less; the last one always applies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from eval.diagnose.divergence import Evidence
from eval.diagnose.prompt import THINK_CLOSINGS, THINK_OPENINGS, Kind, Piece

WINDOW = 48  # characters that are compared behind a difference
_AROUND = 40  # characters to both sides in which a time or an id may begin and end


class Rule(NamedTuple):
    """One probable cause."""

    name: str
    title: str
    applies: Callable[[Evidence], bool]
    remedy: str
    fault: bool = True  # False: what a client may well do on purpose


def _retokenised(e: Evidence) -> bool:
    return e.same_text


def _kinds(e: Evidence, kind: Kind) -> bool:
    return e.old_kind is kind and e.new_kind is kind


def _tools_reordered(e: Evidence) -> bool:
    return _kinds(e, Kind.TOOLS) and _same_parts(_of_kind(e, Kind.TOOLS))


def _tools_key_order(e: Evidence) -> bool:
    old, new = _of_kind(e, Kind.TOOLS)
    return _kinds(e, Kind.TOOLS) and Counter(_squeezed(old)) == Counter(_squeezed(new))


def _tools_changed(e: Evidence) -> bool:
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


def _timestamp(e: Evidence) -> bool:
    return _both_match(e, _TIME) is not None


def _nonce(e: Evidence) -> bool:
    found = _both_match(e, _ID)
    return (
        found is not None
        and min(map(len, found)) >= _SHORTEST_ID
        and _goes_on_alike(e, *found)
        and e.old_kind is e.new_kind
        and e.old_kind is not Kind.THINK
    )


def _truncated(e: Evidence) -> bool:
    """What the turn goes on with is a later message of the predecessor: something between was left out."""
    return _later(e.new_rest, e.old_rest)


def _inserted(e: Evidence) -> bool:
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


def _system_changed(e: Evidence) -> bool:
    return Kind.SYSTEM in (e.old_kind, e.new_kind)


def _thought(e: Evidence) -> str:
    """The reasoning of the predecessor's think block at the divergence, without its tags."""
    text = e.old.text if e.old is not None and e.old.kind is Kind.THINK else ""
    for tag in (*THINK_OPENINGS, *THINK_CLOSINGS):
        text = text.replace(tag, "")
    return text.strip()


def _think_as_content(e: Evidence) -> bool:
    """The reasoning itself goes on as the answer's text, within the same message."""
    thought = _thought(e)
    return bool(thought) and e.new_kind is Kind.ANSWER and thought[:WINDOW] in e.new_from(len(thought) + WINDOW)


def _stray_tag(e: Evidence) -> bool:
    """An answer begins with the closing tag of a think block that it does not open, on one side only."""

    def stray(text: str, kind: Kind | None) -> bool:
        return kind is Kind.ANSWER and text.lstrip().startswith(THINK_CLOSINGS)

    return stray(e.old_from(WINDOW), e.old_kind) != stray(e.new_from(WINDOW), e.new_kind)


def _template_without_reasoning(e: Evidence) -> bool:
    return _think_dropped(e) and _thought(e) in e.after.reasoning_sent


def _think_dropped(e: Evidence) -> bool:
    return e.old_kind is Kind.THINK and e.new_kind is not Kind.THINK


def _think_inserted(e: Evidence) -> bool:
    return e.new_kind is Kind.THINK and e.old_kind is not Kind.THINK


def _think_changed(e: Evidence) -> bool:
    return _kinds(e, Kind.THINK)


def _argument_order(e: Evidence) -> bool:
    return _kinds(e, Kind.CALL) and _permuted(*_at(e))


def _argument_spacing(e: Evidence) -> bool:
    old, new = _at(e)
    return _kinds(e, Kind.CALL) and _squeezed(old) == _squeezed(new)


def _call_changed(e: Evidence) -> bool:
    return _kinds(e, Kind.CALL)


_CLEARED = re.compile(r"cleared|omitted|truncated|elided|removed|compressed|\[\.\.\.\]", re.IGNORECASE)


def _result_cleared(e: Evidence) -> bool:
    old, new = _at(e)
    return _kinds(e, Kind.RESULT) and (bool(_CLEARED.search(new)) or len(new) < len(old))


_SUMMARY = re.compile(r"summar|continued from a previous|compact|condensed|so far", re.IGNORECASE)


def _compacted(e: Evidence) -> bool:
    return e.after.compacted or (
        len(e.after.text) < len(e.before.text)
        and e.new_kind in (Kind.USER, Kind.SYSTEM)
        and bool(_SUMMARY.search(e.new_from(400)))
    )


def _answer_left_out(e: Evidence) -> bool:
    """The predecessor's answer is not there at all: a user message or nothing stands in its place."""
    old, new = _text(e.old_rest), _text(e.new_rest)
    return (
        old is not None
        and old.kind in (Kind.ANSWER, Kind.THINK, Kind.CALL)
        and (new is None or new.kind in (Kind.USER, Kind.RESULT, Kind.SYSTEM))
    )


def _spacing(e: Evidence) -> bool:
    old, new = e.old_from(2 * WINDOW), e.new_from(2 * WINDOW)
    spaces = old[:1].isspace() != new[:1].isspace()
    return spaces and old.lstrip()[:WINDOW] == new.lstrip()[:WINDOW]


def _user_changed(e: Evidence) -> bool:
    """A user message differs, and the same messages follow it."""
    if not _kinds(e, Kind.USER):
        return False
    old, new = _text(_behind(e.old_rest)), _text(_behind(e.new_rest))
    return old is not None and new is not None and (old.kind, old.text) == (new.kind, new.text)


def _behind(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The pieces of later messages."""
    return tuple(piece for piece in pieces if piece.message > pieces[0].message)


def _rewound(e: Evidence) -> bool:
    old, new = _text(e.old_rest), _text(e.new_rest)
    return new is None or (new.kind is Kind.USER and old is not None and old.kind is Kind.USER)


def _answer_changed(e: Evidence) -> bool:
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


RULES: tuple[Rule, ...] = (
    Rule(
        "retokenised",
        "the same text in other tokens",
        _retokenised,
        "send the generated token ids back (input_ids) instead of the decoded text, or accept the loss up to here",
    ),
    Rule(
        "timestamp",
        "a date or time",
        _timestamp,
        "put the time into the newest user message, or round it to the day; keep it out of tools and system prompt",
    ),
    Rule(
        "tools_reordered",
        "the same tools in another order",
        _tools_reordered,
        "send tools in one fixed order, e.g. by name",
    ),
    Rule(
        "tools_key_order",
        "the same tools with their keys in another order",
        _tools_key_order,
        "serialise tool schemas once and reuse the text; do not pass them through a map without order",
    ),
    Rule(
        "nonce",
        "an id or number that is new in each request",
        _nonce,
        "move the id behind the stable text (last message), or out of the prompt into a header or metadata field",
    ),
    Rule(
        "tools_changed",
        "tool definitions changed",
        _tools_changed,
        "declare all tools from the first turn on; changing them in a conversation recomputes all of it",
    ),
    Rule(
        "truncated_by_client",
        "older messages were left out by the client",
        _truncated,
        "drop history rarely and much at once instead of a little each turn, or raise the client's context limit",
    ),
    Rule(
        "compacted",
        "the history was replaced by a summary",
        _compacted,
        "expected after a compaction: the first turn after it is computed anew; compact less often, or keep the head",
        fault=False,
    ),
    Rule(
        "inserted",
        "messages were inserted before the end",
        _inserted,
        "append reminders behind the newest message; what is inserted in the middle recomputes all behind it",
    ),
    Rule(
        "system_changed",
        "the system prompt changed",
        _system_changed,
        "keep the system prompt fixed for a conversation; put what changes into the newest message",
    ),
    Rule(
        "stray_think_tag",
        "the closing tag of a think block without its opening",
        _stray_tag,
        "set thinking_mode (chat_template_kwargs) and the server's --reasoning-parser, so that tags are not content",
    ),
    Rule(
        "think_as_content",
        "thinking was sent back as the answer's text",
        _think_as_content,
        "send it back as reasoning_content, and start the server with its --reasoning-parser",
    ),
    Rule(
        "template_without_reasoning",
        "the chat template renders history without the reasoning that the client sent",
        _template_without_reasoning,
        "use a template that keeps reasoning of earlier turns (or its option for that), if the model was trained so",
    ),
    Rule(
        "answer_left_out",
        "the predecessor's answer is not in the history",
        _answer_left_out,
        "send the answer back; if its place was computed by another request, this is a branch and not a fault",
    ),
    Rule(
        "think_dropped",
        "a think block is missing in the history",
        _think_dropped,
        "send reasoning_content back as it came, empty blocks included, or switch thinking off for all turns",
    ),
    Rule(
        "think_inserted",
        "the history has a think block that was not generated there",
        _think_inserted,
        "use the same thinking mode in all turns: the template writes an (empty) block where none was generated",
    ),
    Rule("think_changed", "a think block changed", _think_changed, "send reasoning back as it came, byte for byte"),
    Rule(
        "argument_order",
        "the same tool arguments in another order",
        _argument_order,
        "send the arguments back as the text that came; parsing and serialising, with or without sorted keys, "
        "reorders what the model wrote",
    ),
    Rule(
        "argument_spacing",
        "the same tool arguments with other spaces",
        _argument_spacing,
        "send the arguments back as the text that came, or serialise as the template does",
    ),
    Rule("call_changed", "a tool call changed", _call_changed, "send tool calls back as they came"),
    Rule(
        "result_cleared",
        "an older tool result was shortened or cleared",
        _result_cleared,
        "clear results seldom and many at once: each change recomputes all behind it",
    ),
    Rule(
        "spacing",
        "white space at the edge of a message",
        _spacing,
        "send messages back untrimmed; a template that strips them needs answers without outer spaces",
    ),
    Rule(
        "user_changed",
        "an earlier user message changed",
        _user_changed,
        "append reminders and context to the newest message only; keep older ones as they were sent",
    ),
    Rule(
        "rewound",
        "the conversation went back and took another way",
        _rewound,
        "expected when a user edits or retries; what was behind that place is of no use now",
        fault=False,
    ),
    Rule("answer_changed", "an earlier answer changed", _answer_changed, "send answers back as they came"),
    Rule(
        "history_changed",
        "earlier text changed",
        lambda e: True,
        "look at the two texts; keep what was sent once as it is",
    ),
)


def probable_cause(evidence: Evidence) -> Rule:
    """The first rule that applies."""
    return next(rule for rule in RULES if rule.applies(evidence))
