"""From messages to turns: what readers of text share.

Two kinds of text formats: a *log* holds each request with its complete history (``logged_turns``); a *script* holds
only what is new in each request, and the server's reply will be put into the history when it is run
(``ScriptedFlow``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radix_cache.theory import common_blocks
from traces.model import StopReason, TraceError, Turn
from traces.readers.ids import MAX_PROMPT_TOKENS, TokenBlocks
from traces.text import ChatTokenizer, Message, TemplateError, Tokens

BLOCK_SIZE = 64  # as in Weka's collections, so that rates compare


@dataclass(frozen=True, slots=True)
class LoggedCall:
    """A request of a log.

    Attributes:
        source: file and line of it.
        messages: the complete prompt, at least one message.
        tools: OpenAI tool definitions.
        answer: the assistant's message; None where it is not known.
        output_tokens: length of the answer where its text is not known.
        sent_s: when it was sent, and ended_s when its answer ended; seconds on any one clock.
    """

    source: str
    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    answer: Message | None = None
    output_tokens: int = 0
    sent_s: float = 0.0
    ended_s: float | None = None
    stop: StopReason = StopReason.UNKNOWN
    model: str = ""


def logged_turns(
    calls: Iterable[LoggedCall], tokenizer: ChatTokenizer, blocks: TokenBlocks, *, origin_s: float, session: str
) -> tuple[Turn, ...]:
    """Turns of one flow, in the order given.

    Args:
        calls: requests with complete prompts.
        tokenizer: of the served model.
        blocks: the session's block ids; a subagent has those of its session.
        origin_s: start of the session on the clock of the calls.
        session: its id, for messages.

    Raises:
        TraceError: a prompt that the template refuses, is empty or too long; or a call sent before its predecessor.
    """
    turns: list[Turn] = []
    ended: float | None = None
    for index, call in enumerate(calls):
        prompt = _tokens(tokenizer, call.messages, call.tools, True, call.source, session, index)
        output = call.output_tokens
        if call.answer is not None:
            whole = _tokens(tokenizer, [*call.messages, call.answer], call.tools, False, call.source, session, index)
            output = max(0, len(whole) - len(prompt))
        start = call.sent_s - origin_s
        if start < (turns[-1].start_s if turns else 0.0):
            message = "was sent before its predecessor; lines of a session must be sorted by time"
            raise TraceError(message, file=call.source, session=session, turn=index)
        turns.append(
            Turn(
                index=index,
                start_s=start,
                prompt_tokens=len(prompt),
                output_tokens=output,
                block_ids=blocks.ids(prompt),
                think_s=None if ended is None else max(0.0, call.sent_s - ended),
                api_s=None if call.ended_s is None else max(0.0, call.ended_s - call.sent_s),
                stop=call.stop,
                model=call.model,
            )
        )
        ended = call.ended_s
    return tuple(turns)


@dataclass(slots=True)
class Replies:
    """Tokens of replies that nobody knows yet: found nowhere else in the session, since they are negative."""

    _next: int = -1

    def take(self, count: int) -> Tokens:
        self._next -= count
        return np.arange(self._next + 1, self._next + 1 + count, dtype=np.int64)


@dataclass(slots=True)
class ScriptedFlow:
    """A conversation of which each turn gives what is new; replies have known lengths and unknown tokens."""

    tokenizer: ChatTokenizer
    replies: Replies
    session: str
    _messages: list[Message] = field(default_factory=list)
    _tools: Sequence[Message] = ()
    _rendered: Tokens | None = None  # of the last prompt, with empty replies
    _prompt: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    _reply: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def turn(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, reply_tokens: int, source: str, index: int
    ) -> Tokens:
        """The prompt of the next turn: int64 ids, those of replies negative.

        Raises:
            TraceError: the template refuses the messages, or the prompt is too long.
        """
        self._messages = [*self._messages, *messages]
        self._tools = self._tools if tools is None else tools
        rendered = _tokens(self.tokenizer, self._messages, self._tools, True, source, self.session, index)
        if self._rendered is None:
            self._prompt = rendered
        else:
            # The reply stands where the last prompt ended, but for tokens that open an answer and do not stay.
            common = common_blocks(self._rendered, rendered)
            gone = len(self._rendered) - common
            kept = self._prompt[: max(0, len(self._prompt) - gone)]
            self._prompt = np.concatenate([kept, self._reply, rendered[common:]])
        if len(self._prompt) > MAX_PROMPT_TOKENS:
            message = f"has a prompt of {len(self._prompt)} tokens with its history; at most {MAX_PROMPT_TOKENS} can be"
            raise TraceError(message, file=source, session=self.session, turn=index)
        self._rendered = rendered
        self._reply = self.replies.take(reply_tokens)
        self._messages.append({"role": "assistant", "content": ""})
        return self._prompt

    def fork(self) -> ScriptedFlow:
        """A conversation that goes on from here, last reply included."""
        return ScriptedFlow(
            self.tokenizer, self.replies, self.session, list(self._messages), self._tools, self._rendered,
            self._prompt, self._reply,
        )  # fmt: skip


def _tokens(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    tools: Sequence[Message],
    answering: bool,
    source: str,
    session: str,
    index: int,
) -> Tokens:
    try:
        tokens = tokenizer.prompt(messages, tools, answering=answering)
    except TemplateError as error:
        raise TraceError(str(error), file=source, session=session, turn=index, field="messages") from error
    if not 1 <= len(tokens) <= MAX_PROMPT_TOKENS:
        message = f"makes {len(tokens)} tokens; a prompt has 1 to {MAX_PROMPT_TOKENS}"
        raise TraceError(message, file=source, session=session, turn=index, field="messages")
    return tokens
