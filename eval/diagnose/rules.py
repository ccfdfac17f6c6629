"""Probable causes of a broken prefix: one entry a rule, the first that applies is named. Pure.

Another cause is one more ``Rule`` in ``RULES``: a name, a sentence, a predicate on the ``Evidence``, and what to do.
Rules that ask for more evidence stand before those that ask for less; the last one always applies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from eval.diagnose import signs
from eval.diagnose.divergence import Evidence


class Rule(NamedTuple):
    """One probable cause."""

    name: str
    title: str
    applies: Callable[[Evidence], bool]
    remedy: str
    fault: bool = True  # False: what a client may well do on purpose


RULES: tuple[Rule, ...] = (
    Rule(
        "retokenised",
        "the same text in other tokens",
        signs.retokenised,
        "send the generated token ids back (input_ids) instead of the decoded text, or accept the loss up to here",
    ),
    Rule(
        "timestamp",
        "a date or time",
        signs.timestamp,
        "put the time into the newest user message, or round it to the day; keep it out of tools and system prompt",
    ),
    Rule(
        "tools_reordered",
        "the same tools in another order",
        signs.tools_reordered,
        "send tools in one fixed order, e.g. by name",
    ),
    Rule(
        "tools_key_order",
        "the same tools with their keys in another order",
        signs.tools_key_order,
        "serialise tool schemas once and reuse the text; do not pass them through a map without order",
    ),
    Rule(
        "nonce",
        "an id or number that is new in each request",
        signs.nonce,
        "move the id behind the stable text (last message), or out of the prompt into a header or metadata field",
    ),
    Rule(
        "tools_changed",
        "tool definitions changed",
        signs.tools_changed,
        "declare all tools from the first turn on; changing them in a conversation recomputes all of it",
    ),
    Rule(
        "truncated_by_client",
        "older messages were left out by the client",
        signs.truncated,
        "drop history rarely and much at once instead of a little each turn, or raise the client's context limit",
    ),
    Rule(
        "compacted",
        "the history was replaced by a summary",
        signs.compacted,
        "expected after a compaction: the first turn after it is computed anew; compact less often, or keep the head",
        fault=False,
    ),
    Rule(
        "inserted",
        "messages were inserted before the end",
        signs.inserted,
        "append reminders behind the newest message; what is inserted in the middle recomputes all behind it",
    ),
    Rule(
        "system_changed",
        "the system prompt changed",
        signs.system_changed,
        "keep the system prompt fixed for a conversation; put what changes into the newest message",
    ),
    Rule(
        "stray_think_tag",
        "the closing tag of a think block without its opening",
        signs.stray_tag,
        "set thinking_mode (chat_template_kwargs) and the server's --reasoning-parser, so that tags are not content",
    ),
    Rule(
        "think_as_content",
        "thinking was sent back as the answer's text",
        signs.think_as_content,
        "send it back as reasoning_content, and start the server with its --reasoning-parser",
    ),
    Rule(
        "template_without_reasoning",
        "the chat template renders history without the reasoning that the client sent",
        signs.template_without_reasoning,
        "use a template that keeps reasoning of earlier turns (or its option for that), if the model was trained so",
    ),
    Rule(
        "answer_left_out",
        "the predecessor's answer is not in the history",
        signs.answer_left_out,
        "send the answer back; if its place was computed by another request, this is a branch and not a fault",
    ),
    Rule(
        "think_dropped",
        "a think block is missing in the history",
        signs.think_dropped,
        "send reasoning_content back as it came, empty blocks included, or switch thinking off for all turns",
    ),
    Rule(
        "think_inserted",
        "the history has a think block that was not generated there",
        signs.think_inserted,
        "use the same thinking mode in all turns: the template writes an (empty) block where none was generated",
    ),
    Rule("think_changed", "a think block changed", signs.think_changed, "send reasoning back as it came"),
    Rule(
        "argument_order",
        "the same tool arguments in another order",
        signs.argument_order,
        "send the arguments back as the text that came; parsing and serialising, with or without sorted keys, "
        "reorders what the model wrote",
    ),
    Rule(
        "argument_spacing",
        "the same tool arguments with other spaces",
        signs.argument_spacing,
        "send the arguments back as the text that came, or serialise as the template does",
    ),
    Rule("call_changed", "a tool call changed", signs.call_changed, "send tool calls back as they came"),
    Rule(
        "result_cleared",
        "an older tool result was shortened or cleared",
        signs.result_cleared,
        "clear results seldom and many at once: each change recomputes all behind it",
    ),
    Rule(
        "spacing",
        "white space at the edge of a message",
        signs.spacing,
        "send messages back untrimmed; a template that strips them needs answers without outer spaces",
    ),
    Rule(
        "user_changed",
        "an earlier user message changed",
        signs.user_changed,
        "append reminders and context to the newest message only; keep older ones as they were sent",
    ),
    Rule(
        "rewound",
        "the conversation went back and took another way",
        signs.rewound,
        "expected when a user edits or retries; what was behind that place is of no use now",
        fault=False,
    ),
    Rule("answer_changed", "an earlier answer changed", signs.answer_changed, "send answers back as they came"),
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
