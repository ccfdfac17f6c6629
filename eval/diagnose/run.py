"""A log's calls, turn by turn: what broke, what the server missed, and the sums. Pure but for reading the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from eval.diagnose import Break, diagnose
from eval.diagnose.chat import Call, Message, Request, render
from eval.diagnose.conversations import Conversations
from eval.diagnose.misses import Miss, find_miss
from eval.diagnose.prompt import Prompt, Tokenize, Tokens, prompt_of_text

SCHEMA_VERSION = 1
_TAIL = 256  # characters before and behind an answer in which tokens could join

# Request, answer to append, whether the prompt ends where the model shall go on -> text as the model sees it.
Template = Callable[[Request, tuple[Message, ...], bool], str]


class RefusedMessagesError(ValueError):
    """A chat template that does not take these messages."""


@dataclass(frozen=True)
class BrokenTurn:
    """A turn that does not begin with its predecessor's prompt and answer."""

    where: str
    before: str  # the predecessor's place in the log
    session: str | None
    found: Break
    prompt_tokens: int | None
    cached_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        place = self.found.place
        return {
            "where": self.where,
            "follows": self.before,
            "session": self.session,
            "cause": self.found.cause,
            "title": self.found.title,
            "fault": self.found.fault,
            "kind": self.found.kind,
            **place._asdict(),
            "lost": place.lost,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


@dataclass(frozen=True)
class MissedTurn:
    """A turn whose text continues, and of which the server had less than it could."""

    where: str
    before: str
    session: str | None
    found: Miss

    def as_dict(self) -> dict[str, Any]:
        return {"where": self.where, "follows": self.before, "session": self.session, **self.found._asdict()}


@dataclass
class Cause:
    """Sum over the turns with one cause."""

    name: str
    title: str
    remedy: str
    fault: bool
    turns: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # unit -> how many


@dataclass
class Diagnosis:
    """What a log says; ``as_dict`` is the JSON output, whose fields keep their meaning within a schema version."""

    following: Conversations = field(default_factory=Conversations, repr=False)  # logs that continue each other
    calls: int = 0
    compared: int = 0  # calls with a predecessor
    broken: list[BrokenTurn] = field(default_factory=list)
    missed: list[MissedTurn] = field(default_factory=list)
    causes: dict[str, Cause] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)  # FILE:LINE: reason
    prompt_tokens: int = 0  # as servers counted, over the calls that say both
    cached_tokens: int = 0

    @property
    def conversations(self) -> int:
        return self.following.count

    def ranked(self) -> list[Cause]:
        """Causes with the most lost first."""
        return sorted(self.causes.values(), key=lambda c: (-sum(c.lost.values()), c.name))

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "calls": self.calls,
            "conversations": self.conversations,
            "compared": self.compared,
            "appended": self.compared - len(self.broken),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "causes": [asdict(cause) for cause in self.ranked()],
            "broken": [turn.as_dict() for turn in self.broken],
            "missed": [turn.as_dict() for turn in self.missed],
            "skipped": self.skipped,
        }


def diagnose_calls(
    calls: Iterable[Call],
    into: Diagnosis,
    *,
    template: Template | None = None,
    tokenize: Tokenize | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Diagnosis:
    """Compare each call with the one that it continues.

    Args:
        calls: in order.
        into: is added to, so that several logs make one diagnosis; a log may go on where the one before ended.
        template: renders messages as the server does; None: in a neutral form, and places are in characters.
        tokenize: of the server's tokenizer; None: no tokens, but where the log has them.
        progress: called after each call.
    """
    for call in calls:
        into.calls += 1
        if call.prompt_tokens is not None and call.cached_tokens is not None:
            into.prompt_tokens += call.prompt_tokens
            into.cached_tokens += call.cached_tokens
        before = into.following.predecessor(call)
        if before is not None:
            into.compared += 1
            _compare(before, call, into, template, tokenize)
        progress()
    return into


def _compare(before: Call, call: Call, into: Diagnosis, template: Template | None, tokenize: Tokenize | None) -> None:
    try:
        found = compare(before, call, template=template, tokenize=tokenize)
    except RefusedMessagesError as error:
        into.skipped.append(f"{call.where}: {error}")
        return
    if found is None:
        missed = find_miss(before, call)
        if missed is not None:
            into.missed.append(MissedTurn(call.where, before.where, call.session, missed))
        return
    into.broken.append(
        BrokenTurn(call.where, before.where, call.session, found, call.prompt_tokens, call.cached_tokens)
    )
    cause = into.causes.setdefault(found.cause, Cause(found.cause, found.title, found.remedy, found.fault))
    cause.turns += 1
    cause.lost[found.place.unit] = cause.lost.get(found.place.unit, 0) + found.place.lost


def compare(
    before: Call, after: Call, *, template: Template | None = None, tokenize: Tokenize | None = None
) -> Break | None:
    """The first divergence of a call from its predecessor's prompt and answer.

    Where there are messages and a template, the prompt that was really sent is compared first (its end, where the
    model was told to go on, is the template's), then the answer as the template renders it.

    Raises:
        RefusedMessagesError: by the template.
    """
    one, other = before.request, after.request
    if one.ids is not None and other.ids is not None:
        return diagnose(_of_ids(before, tokenize, answer=True), _of_ids(after, tokenize, answer=False))
    if template is None or not one.messages or not other.messages:
        if one.text is not None and other.text is not None:
            return _of_texts(one.text, before.answer_text or "", other.text, other, tokenize)
        return None if _same_messages(before, after) else diagnose(render(one, before.answer), render(other))
    turn, sent = template(other, (), True), template(one, (), True)
    whole = template(one, before.answer, False) if before.answer else sent
    if not turn.startswith(sent) or not whole.startswith(sent):
        # The template does not write in history what it wrote for the model to go on from.
        whole = sent + (_generated(before.answer) if not turn.startswith(sent) else "")
    return _of_texts(sent, whole[len(sent) :], turn, other, tokenize)


def _of_texts(sent: str, answer: str, turn: str, request: Request, tokenize: Tokenize | None) -> Break | None:
    """The divergence of texts as the model sees them. Tokens are made only where there is one."""
    whole = sent + answer
    if turn.startswith(whole) and (tokenize is None or _joins(sent, answer, turn, tokenize)):
        return None
    tokens: tuple[Tokens | None, Tokens | None] = (None, None)
    if tokenize is not None:
        first, second = tokenize(sent), tokenize(answer)
        ends = [*(first.ends or ()), *(len(sent) + end for end in second.ends or ())]
        tokens = Tokens([*first.ids, *second.ids], ends), tokenize(turn)
    before, after = prompt_of_text(whole, tokens[0]), prompt_of_text(turn, tokens[1])
    return diagnose(before, replace(after, reasoning_sent=request.reasoning_sent(), compacted=request.compacted))


def _joins(sent: str, answer: str, turn: str, tokenize: Tokenize) -> bool:
    """Whether the answer's tokens, made apart from the prompt's, are those of the whole text where the two meet."""
    tail = sent[-_TAIL:]
    behind = turn[len(sent) + len(answer) :][:_TAIL]
    apart = [*tokenize(tail).ids, *tokenize(answer).ids]
    return list(tokenize(tail + answer + behind).ids[: len(apart)]) == apart


def _same_messages(before: Call, after: Call) -> bool:
    """The quick answer for most turns: the same messages, and some more."""
    known = (*before.request.messages, *before.answer)
    return (
        bool(known)
        and before.request.tools == after.request.tools
        and after.request.messages[: len(known)] == known
        and not after.request.compacted
    )


def _generated(answer: tuple[Message, ...]) -> str:
    """About what the model wrote behind the prompt: enough to name what is missing there."""
    first = answer[0] if answer else None
    if first is None:
        return ""
    return (f"{first.reasoning}</think>" if first.reasoning is not None else "") + first.content


def _of_ids(call: Call, tokenize: Tokenize | None, *, answer: bool) -> Prompt:
    """A prompt of which the log has the tokens. The last generated one is in no cache: it was not computed."""
    ids = call.request.ids or ()
    text = call.request.text or ""
    if answer:
        ids = (*ids, *(call.answer_ids or ())[:-1])
        text += call.answer_text or ""
    ends = None
    if tokenize is not None:
        # The tokenizer's own tokens have places in the text; the log's have them only where they are the same.
        own = tokenize(text)
        ends = own.ends if list(own.ids) == list(ids) else None
    return prompt_of_text(text, Tokens(ids, ends))
