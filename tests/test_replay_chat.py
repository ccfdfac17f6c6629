"""Prompts as chat messages: equal tokens are equal text, and messages follow the edits."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_cache.prefix_index import common_length
from traces.replay.clients.chat import VOCABULARY, WORDS, Conversation, text_of


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) == VOCABULARY[1]
    assert all(word.isalpha() and word.islower() for word in WORDS)


def test_append_adds_the_answer_and_a_user_message() -> None:
    talk = Conversation(head_tokens=2)
    first = talk.messages(tokens(1, 2, 3))
    assert [m["role"] for m in first] == ["system", "user"]
    second = talk.messages(tokens(1, 2, 3, 4, 5, 6), answer_tokens=2)
    assert second[:2] == first
    assert second[2:] == (
        {"role": "assistant", "content": text_of(tokens(4, 5))},
        {"role": "user", "content": text_of(tokens(6))},
    )


def test_own_answer_takes_the_place_of_the_recorded_one_and_stays() -> None:
    talk = Conversation(0)
    talk.messages(tokens(1))
    talk.messages(tokens(1, 2, 3), answer_tokens=1, answer_text="my words")
    third = talk.messages(tokens(1, 2, 3, 4, 5), answer_tokens=1)
    assert [m["content"] for m in third] == [WORDS[1], "my words", WORDS[3], WORDS[4], WORDS[5]]


def test_going_back_drops_what_no_longer_matches() -> None:
    talk = Conversation(1)
    talk.messages(tokens(1, 2))
    talk.messages(tokens(1, 2, 3, 4), answer_tokens=1)
    edited = talk.messages(tokens(1, 2, 3, 9, 9), answer_tokens=1)
    assert [m["content"] for m in edited] == [WORDS[1], WORDS[2], WORDS[3], f"{WORDS[9]} {WORDS[9]}"]
    from_scratch = talk.messages(tokens(8, 7), answer_tokens=1)
    assert [(m["role"], m["content"]) for m in from_scratch] == [("system", WORDS[8]), ("user", WORDS[7])]


PROMPT = st.lists(st.integers(0, 3), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPT, st.integers(0, 4)), min_size=1, max_size=8), st.integers(0, 5))
def test_messages_say_the_prompt_and_end_with_the_user(turns: list[tuple[list[int], int]], head: int) -> None:
    talk = Conversation(head)
    for values, answered in turns:
        messages = talk.messages(tokens(*values), answer_tokens=answered)
        assert " ".join(m["content"] for m in messages) == text_of(tokens(*values))
        assert messages[-1]["role"] == "user"
        assert all(m["content"] for m in messages)
        roles = [m["role"] for m in messages]
        assert all(a != b for a, b in pairwise(roles))
        assert "system" not in roles[1:]


@settings(deadline=None)
@given(PROMPT, PROMPT)
def test_common_text_is_common_tokens(a: list[int], b: list[int]) -> None:
    words = [text_of(tokens(*values)).split() for values in (a, b)]
    same = next((k for k, (x, y) in enumerate(zip(*words, strict=False)) if x != y), min(len(a), len(b)))
    assert same == common_length(tokens(*a), tokens(*b))
