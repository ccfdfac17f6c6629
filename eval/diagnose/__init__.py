"""Where a prefix broke: a turn's first difference from its predecessor, and the probable cause. Pure.

    diagnose(before: str | Prompt, after: str | Prompt) -> Break | None

``before`` is what the server had after the predecessor: its prompt *and* its answer, as text; ``after`` is the turn's
prompt. None: the turn begins with all of it. ``Break.cause`` is a name of ``RULES``, ``Break.place`` where and how
much. With ``prompt_of_text(text, Tokens(ids, ends))`` the numbers are tokens, and other tokens of one text show.
"""

from __future__ import annotations

from typing import NamedTuple

from eval.diagnose.divergence import Evidence, Place, find_divergence
from eval.diagnose.prompt import Kind, Piece, Prompt, Tokenize, Tokens, prompt_of_text
from eval.diagnose.rules import RULES, Rule, probable_cause

__all__ = [
    "RULES",
    "Break",
    "Evidence",
    "Kind",
    "Piece",
    "Place",
    "Prompt",
    "Rule",
    "Tokenize",
    "Tokens",
    "diagnose",
    "prompt_of_text",
]


class Break(NamedTuple):
    """A turn that does not begin with all of its predecessor."""

    cause: str  # name of a rule
    title: str
    remedy: str
    place: Place
    fault: bool  # False: what a client may well do on purpose (compaction, going back)
    kind: str  # of the predecessor's text at the divergence: "system prompt", "tool call", ...; "end" behind it


def diagnose(before: str | Prompt, after: str | Prompt) -> Break | None:
    """The first divergence with its probable cause; None where ``after`` begins with all of ``before``.

    Args:
        before: the predecessor's prompt with its answer.
        after: the turn's prompt.
    """
    one, other = (prompt_of_text(p) if isinstance(p, str) else p for p in (before, after))
    found = find_divergence(one, other)
    if found is None:
        return None
    place, evidence = found
    rule = probable_cause(evidence)
    kind = evidence.old_kind or evidence.new_kind
    return Break(rule.name, rule.title, rule.remedy, place, rule.fault, "end" if kind is None else kind.value)
