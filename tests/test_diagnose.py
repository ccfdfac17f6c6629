"""Where a prefix broke and why: each rule on the smallest pair of prompts that shows it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.diagnose import RULES, Tokens, diagnose, prompt_of_text

SYSTEM = "]~!b[]~b]system\nYou are a coding agent.[e~[\n"
TOOLS = "]~!b[]~b]system\nYou help.\n\n# Tools\n<tools>\n{tools}\n</tools>[e~[\n"
USER = "]~b]user\nlist the files[e~[\n"
THINK = "<mm:think>I should call ls</mm:think>"
CALL = (
    ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="ls">{"path": ".", "all": true}]<]minimax[>[</invoke>\n'
    "]<]minimax[>[</tool_call>"
)
ANSWER = f"]~b]ai\n{THINK}I will look.{CALL}[e~[\n"
RESULT = "]~b]tool\na.py\nb.py\nc.py[e~[\n"
NEXT = "]~b]user\nthank you, go on[e~[\n]~b]ai\n"
HEAD = SYSTEM + USER + ANSWER + RESULT
CHAT = SYSTEM + "".join(
    f"]~b]user\nquestion number {i} is long enough to be found[e~[\n]~b]ai\nthe answer to number {i} is long too[e~[\n"
    for i in range(4)
)
ONE, TWO = '{"name": "ls", "parameters": {"path": "string"}}', '{"name": "cat", "parameters": {"file": "string"}}'


def tools(*lines: str) -> str:
    return TOOLS.format(tools="\n".join(lines)) + USER


CASES: dict[str, tuple[str, str]] = {
    "timestamp": (
        HEAD.replace("agent.", "agent. It is 2026-11-30 14:03."),
        HEAD.replace("agent.", "agent. It is 2026-11-30 14:04."),
    ),
    "nonce": (HEAD.replace("agent.", "agent. Run 8fa3c2de11."), HEAD.replace("agent.", "agent. Run 19bb02c4aa.")),
    "tools_reordered": (tools(ONE, TWO), tools(TWO, ONE)),
    "tools_key_order": (
        tools(ONE),
        tools('{"parameters": {"path": "string"}, "name": "ls"}'),
    ),
    "tools_changed": (tools(ONE), tools(ONE, TWO)),
    "compacted": (
        CHAT,
        SYSTEM + "]~b]user\nThis session is being continued from a previous conversation. Summary: ...[e~[\n",
    ),
    "truncated_by_client": (CHAT, SYSTEM + CHAT[CHAT.index("]~b]user\nquestion number 2") :]),
    "inserted": (
        CHAT,
        SYSTEM + "]~b]user\na reminder of something[e~[\n" + CHAT[len(SYSTEM) :],
    ),
    "system_changed": (HEAD, HEAD.replace("a coding agent", "an agent that codes")),
    "stray_think_tag": (
        SYSTEM + USER + "]~b]ai\n</mm:think>There are three.[e~[\n",
        SYSTEM + USER + "]~b]ai\nThere are three.[e~[\n",
    ),
    "think_as_content": (HEAD, HEAD.replace("<mm:think>", "").replace("</mm:think>", "\n\n")),
    "answer_left_out": (SYSTEM + USER + ANSWER, SYSTEM + USER),
    "think_dropped": (HEAD, HEAD.replace(THINK, "")),
    "think_inserted": (HEAD.replace(THINK, ""), HEAD),
    "think_changed": (HEAD, HEAD.replace("should call", "must call")),
    "argument_order": (HEAD, HEAD.replace('{"path": ".", "all": true}', '{"all": true, "path": "."}')),
    "argument_spacing": (HEAD, HEAD.replace('{"path": ".", "all": true}', '{"path":".","all":true}')),
    "call_changed": (HEAD, HEAD.replace('"all": true', '"all": false')),
    "result_cleared": (HEAD, HEAD.replace("a.py\nb.py\nc.py", "[old tool result cleared]")),
    "spacing": (HEAD.replace("I will look.", "I will look.\n"), HEAD),
    "user_changed": (HEAD, HEAD.replace("list the files", "list the files of this folder")),
    "rewound": (HEAD, SYSTEM + "]~b]user\nno, tell me a joke[e~[\n"),
    "answer_changed": (HEAD, HEAD.replace("I will look.", "Looking.")),
    "history_changed": (HEAD, HEAD.replace("a.py", "z.py")),
}
# Known only with more than the text, see below.
ELSEWHERE = {"retokenised", "template_without_reasoning"}


@pytest.mark.parametrize("cause", CASES)
def test_each_rule_is_the_first_that_applies_to_its_example(cause: str) -> None:
    before, after = CASES[cause]
    found = diagnose(before, after + NEXT)
    assert found is not None
    assert found.cause == cause
    place, turn = found.place, after + NEXT
    assert before[: place.at] == turn[: place.at]
    assert before[place.at] != turn[place.at]
    assert place.lost == len(before) - place.at
    assert before.startswith(place.old_text, place.at)
    assert turn.startswith(place.new_text, place.at)
    assert before[: place.at].endswith(place.shared_text)


def test_a_kept_message_that_speaks_of_a_summary_is_no_compaction() -> None:
    chat = CHAT + "]~b]user\nnow summarise all of it for me[e~[\n"
    found = diagnose(chat, SYSTEM + chat[chat.index("]~b]user\nnow summarise") :] + NEXT)
    assert found is not None
    assert (found.cause, found.fault) == ("truncated_by_client", True)


def test_every_rule_has_an_example_a_name_of_its_own_and_advice() -> None:
    assert [rule.name for rule in RULES if rule.name not in CASES] == sorted(ELSEWHERE)
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.title and rule.remedy for rule in RULES)


def test_a_turn_that_only_appends_is_no_break() -> None:
    assert diagnose(HEAD, HEAD + NEXT) is None
    assert diagnose("", HEAD) is None


def words(text: str, pattern: str) -> Tokens:
    """Tokens as the matches of a pattern; ids are their texts' hashes."""
    found = list(re.finditer(pattern, text, re.DOTALL))
    return Tokens([hash(m[0]) for m in found], [m.end() for m in found])


def test_the_same_text_in_other_tokens() -> None:
    """A reply decoded to text and encoded again: the text is the same, the tokens are not."""
    text = "one two three four five"
    before = prompt_of_text(text, words(text, r"\w+|\s"))
    merged = words(text, r"three four|\w+|\s")
    found = diagnose(before, prompt_of_text(text, merged))
    assert found is not None
    assert (found.cause, found.place.unit, found.place.at, found.place.lost) == ("retokenised", "token", 4, 5)
    # The answer's last token grows when more text follows it.
    longer = text + "th"
    grown = diagnose(before, prompt_of_text(longer, words(longer, r"\w+|\s")))
    assert grown is not None
    assert (grown.cause, grown.place.lost) == ("retokenised", 1)


def test_another_word_is_no_other_tokenisation() -> None:
    before, after = "you say hello", "you say help"
    found = diagnose(
        prompt_of_text(before, words(before, r"hel|\w+|\s")), prompt_of_text(after, words(after, r"\w+|\s"))
    )
    assert found is not None
    assert found.cause != "retokenised"
    assert found.place.at == 4


pieces = st.lists(
    st.sampled_from(
        ["]~b]user\n", "]~b]ai\n", "<mm:think>", "</mm:think>", "<tool_call>", "</tool_call>", "[e~[\n", "a", "1", "{}"]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)


@given(pieces, pieces, pieces)
def test_any_text_has_a_cause_and_a_place_or_no_break(shared: str, old: str, new: str) -> None:
    before, after = shared + old, shared + new
    assert prompt_of_text(before).text == before
    found = diagnose(before, after)
    assert (found is None) == after.startswith(before)
    if found is not None:
        at = found.place.at
        assert at >= len(shared)
        assert before[:at] == after[:at]
        assert before[at : at + 1] != after[at : at + 1]
        assert found.cause in {rule.name for rule in RULES}
