"""Theory at send time: longest common prefixes of a prompt with what the run has sent before.

Exact on the tokens actually sent and received, at page size 1. Two clocks of insertion:

- *instant*: a prompt counts from the moment it is sent, an output from the moment it ends (it does not exist
  before). This is the infinite cache with instant insertion of the definitions.
- *ready*: a prompt counts from its first token, when all of its KV has been computed.

An output of ``n`` tokens leaves the KV of ``n - 1``: the last one is never fed back to the model.
A request that failed counts as inserted all the same, since nobody knows how much of it was computed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radix_cache.prefix_index import TokenPrefixIndex

Tokens = npt.NDArray[np.int32]


class Prefixes(NamedTuple):
    """Longest common prefixes in tokens; field names as in ``RequestRecord``."""

    session_lcp: int
    session_output_lcp: int
    shared_lcp: int
    shared_output_lcp: int
    ready_lcp: int


class PrefixLedger:
    """Remembers what a run sent, per session and over all sessions."""

    def __init__(self) -> None:
        self._prompts = TokenPrefixIndex()
        self._with_output = TokenPrefixIndex()
        self._ready = TokenPrefixIndex()
        self._sessions: dict[str, tuple[TokenPrefixIndex, TokenPrefixIndex]] = {}

    def sent(self, session: str, prompt: Tokens) -> Prefixes:
        """Measure ``prompt`` (int32, shape (n,)) against everything before it, then count it as inserted."""
        own_prompts, own_with_output = self._of(session)
        found = Prefixes(
            session_lcp=own_prompts.longest_prefix(prompt),
            session_output_lcp=own_with_output.longest_prefix(prompt),
            shared_lcp=self._prompts.longest_prefix(prompt),
            shared_output_lcp=self._with_output.longest_prefix(prompt),
            ready_lcp=self._ready.longest_prefix(prompt),
        )
        for index in (own_prompts, own_with_output, self._prompts, self._with_output):
            index.insert(prompt)
        return found

    def first_token(self, prompt: Tokens) -> None:
        """The prompt's KV is complete."""
        self._ready.insert(prompt)

    def ended(self, session: str, prompt: Tokens, output: Tokens | None) -> None:
        """The request ended with ``output`` (None where the server does not tell its token ids)."""
        if output is None or len(output) < 2:
            return
        computed = np.concatenate([prompt, output[:-1]]).astype(np.int32, copy=False)
        for index in (self._of(session)[1], self._with_output, self._ready):
            index.insert(computed)

    def forget(self, session: str) -> None:
        """Drop what only this session needs. The shared indexes keep its tokens."""
        self._sessions.pop(session, None)

    def _of(self, session: str) -> tuple[TokenPrefixIndex, TokenPrefixIndex]:
        if session not in self._sessions:
            self._sessions[session] = (TokenPrefixIndex(), TokenPrefixIndex())
        return self._sessions[session]
