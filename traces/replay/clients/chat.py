"""A trace's prompts as chat messages, for servers that take text only.

Token ids become words one for one (``WORDS``), so equal tokens are equal text and different tokens different
text. A flow's first prompt is a system message (tools + system head) and a user message. Each later prompt keeps
the messages that still match and adds the recorded answer (or the server's own) as an assistant message and
the rest as a user message; a prompt that went back on its history drops the messages that no longer match.

What this cannot do: the server's tokenizer and chat template decide how many tokens the text has, so prompt
lengths are near the recorded ones at best. A word is usually one token for a model with a large vocabulary,
and four to six for a byte-level one.
"""

from __future__ import annotations

from typing import NamedTuple

from radix_cache.prefix_index import common_length
from traces.replay.clients.base import Message, Tokens

_TEXT = """
able acid aged also area army away baby back ball band bank base bath bear beat been beer bell belt best
bill bird blow blue boat body bomb bond bone book boom born boss both bowl bulk burn bush busy call calm
came camp card care case cash cast cell chat chip city club coal coat code cold come cook cool cope copy
core cost crew crop dark data date dawn days dead deal dean dear debt deep deny desk dial diet disc disk
does done door dose down draw drew drop drug dual duke dust duty each earn ease east easy edge else even
ever evil exit face fact fail fair fall farm fast fate fear feed feel feet fell felt file fill film find
fine fire firm fish five flat flow food foot ford form fort four free from fuel full fund gain game gate
gave gear gift girl give glad goal goes gold golf gone good gray grew grey grow gulf hair half hall hand
hang hard harm hate have head hear heat held hell help here hero high hill hire hold hole holy home hope
host hour huge hung hunt hurt idea inch into iron item jack jane jean john join jump jury just keen keep
kept kick kill kind king knee knew know lack lady laid lake land lane last late lead left less life lift
like line link list live load loan lock logo long look lord lose loss lost love luck made mail main make
"""
WORDS = tuple(_TEXT.split())
VOCABULARY = (0, len(WORDS))


def text_of(tokens: Tokens) -> str:
    """Words of token ids within ``VOCABULARY``, joined by spaces."""
    return " ".join(WORDS[token] for token in tokens.tolist())


class _Span(NamedTuple):
    role: str
    start: int  # token range of the flow's current prompt that the message stands for
    end: int
    text: str


class Conversation:
    """The messages of one flow; call ``messages`` once per prompt, in the order of turns."""

    def __init__(self, head_tokens: int) -> None:
        self._head = head_tokens
        self._prompt: Tokens | None = None
        self._spans: list[_Span] = []

    def messages(
        self, prompt: Tokens, *, answer_tokens: int = 0, answer_text: str | None = None
    ) -> tuple[Message, ...]:
        """Messages that stand for ``prompt``; the last one is the user's.

        Args:
            prompt: int32 ids within ``VOCABULARY``, shape (n,), n >= 1.
            answer_tokens: length of the answer to the flow's previous prompt, as recorded.
            answer_text: what the server answered, to be sent instead of the recorded continuation.
        """
        before = self._prompt
        common = 0 if before is None else common_length(before, prompt)
        if before is not None and common == len(before):
            self._append(prompt, common, answer_tokens, answer_text)
        else:
            self._go_back(prompt, common)
        self._prompt = prompt
        return tuple({"role": span.role, "content": span.text} for span in self._spans)

    def _append(self, prompt: Tokens, at: int, answer_tokens: int, answer_text: str | None) -> None:
        if at == len(prompt):
            return  # the same prompt again
        answered = min(answer_tokens, len(prompt) - at - 1)
        if answered > 0:
            text = text_of(prompt[at : at + answered]) if answer_text is None else answer_text
            self._spans.append(_Span("assistant", at, at + answered, text))
            at += answered
        else:
            at = self._spans.pop().start  # templates refuse two user messages in a row
        self._spans.append(_Span("user", at, len(prompt), text_of(prompt[at:])))

    def _go_back(self, prompt: Tokens, common: int) -> None:
        spans = [span for span in self._spans if span.end <= common]
        if not spans and 0 < self._head < len(prompt):
            spans = [_Span("system", 0, self._head, text_of(prompt[: self._head]))]
        while spans and (spans[-1].role == "user" or spans[-1].end == len(prompt)):
            spans.pop()
        at = spans[-1].end if spans else 0
        self._spans = [*spans, _Span("user", at, len(prompt), text_of(prompt[at:]))]
