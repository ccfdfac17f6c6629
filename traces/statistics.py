"""Statistics of a trace in one streaming pass: lengths, how prompts change, gaps, endings, duplicates.

Kept per turn are a few numbers, never block ids, so memory stays small beside the trace.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from radix_cache.theory import common_blocks
from traces.model import Flow, Session, StopReason, Turn

PERCENTILES = (10, 25, 50, 75, 90, 99)
BEGINNING_TURNS = 3
FAR_BACK = 0.1  # a turn that loses more than this share of the previous prompt's blocks pulls back


class Distribution(NamedTuple):
    """Number, mean and the percentiles of ``PERCENTILES``; NaN where nothing was counted."""

    values: int  # how many
    mean: float
    percentiles: dict[int, float]


class Ending(NamedTuple):
    """Main-flow turns with one stop reason."""

    turns: int
    ended_session: int  # of these, how many were their session's last
    gap_s: Distribution  # seconds from the end of such an answer to the next turn


class Duplicates(NamedTuple):
    """Sessions that repeat others, by digests of ids, lengths and arrival times of all main turns."""

    identical: int  # same turns as an earlier session
    prefixes: int  # all turns are the first turns of a longer session
    same_beginning: int  # the first BEGINNING_TURNS turns are those of an earlier session, duplicates included


@dataclass(slots=True)
class TraceStatistics:
    """Feed it sessions with ``add``, then read it. Turns of main flows, unless said otherwise."""

    sessions: int = 0
    requests: int = 0  # subagents included
    prompt_tokens: int = 0  # subagents included
    output_tokens: int = 0  # subagents included
    subagents: int = 0
    sessions_with_subagents: int = 0
    pairs: int = 0  # turns that have a predecessor
    appending: int = 0  # keep every full block of their predecessor
    pulling_back: int = 0  # lose more than FAR_BACK of it
    overlapping: int = 0  # start before their predecessor ended
    _turns: array[float] = field(default_factory=lambda: array("d"))
    _prompts: array[float] = field(default_factory=lambda: array("d"))
    _first_prompts: array[float] = field(default_factory=lambda: array("d"))
    _contexts: array[float] = field(default_factory=lambda: array("d"))
    _outputs: array[float] = field(default_factory=lambda: array("d"))
    _growth: array[float] = field(default_factory=lambda: array("d"))
    _gaps: dict[StopReason, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    _endings: dict[StopReason, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    _whole: dict[bytes, int] = field(default_factory=lambda: defaultdict(int))
    _beginnings: dict[bytes, int] = field(default_factory=lambda: defaultdict(int))
    _proper_prefixes: set[bytes] = field(default_factory=set)

    def add(self, session: Session) -> None:
        self.sessions += 1
        self.subagents += len(session.subagents)
        self.sessions_with_subagents += bool(session.subagents)
        for flow in session.flows():
            self.requests += len(flow.turns)
            self.prompt_tokens += sum(turn.prompt_tokens for turn in flow.turns)
            self.output_tokens += sum(turn.output_tokens for turn in flow.turns)
        self._contexts.append(session.max_context)
        self._add_main(session.main)
        self._add_digests(session.main)

    def distributions(self) -> dict[str, Distribution]:
        """Over sessions: turns, first prompt, largest context. Over turns: prompt, output, tokens appended."""
        return {
            "turns": distribution(self._turns),
            "first prompt": distribution(self._first_prompts),
            "largest context": distribution(self._contexts),
            "prompt": distribution(self._prompts),
            "output": distribution(self._outputs),
            "appended": distribution(self._growth),
        }

    def endings(self) -> dict[StopReason, Ending]:
        return {
            stop: Ending(turns, last, distribution(self._gaps[stop]))
            for stop, (turns, last) in sorted(self._endings.items())
        }

    def duplicates(self) -> Duplicates:
        return Duplicates(
            identical=sum(count - 1 for count in self._whole.values()),
            prefixes=sum(count for digest, count in self._whole.items() if digest in self._proper_prefixes),
            same_beginning=sum(count - 1 for count in self._beginnings.values()),
        )

    def summary(self) -> dict[str, Any]:
        """All numbers, as JSON holds them; keys of percentiles are integers."""
        counts = ["sessions", "requests", "prompt_tokens", "output_tokens", "subagents", "sessions_with_subagents"]
        counts += ["pairs", "appending", "pulling_back", "overlapping"]
        return {
            **{name: getattr(self, name) for name in counts},
            "distributions": {name: values._asdict() for name, values in self.distributions().items()},
            "stop_reasons": {
                stop.value: {**ending._asdict(), "gap_s": ending.gap_s._asdict()}
                for stop, ending in self.endings().items()
            },
            "duplicates": self.duplicates()._asdict(),
        }

    def _add_main(self, main: Flow) -> None:
        self._turns.append(len(main.turns))
        self._first_prompts.append(main.turns[0].prompt_tokens)
        for at, turn in enumerate(main.turns):
            self._prompts.append(turn.prompt_tokens)
            self._outputs.append(turn.output_tokens)
            self._endings[turn.stop][0] += 1
            self._endings[turn.stop][1] += at == len(main.turns) - 1
            if at:
                self._add_pair(main.turns[at - 1], turn)

    def _add_pair(self, before: Turn, turn: Turn) -> None:
        self.pairs += 1
        gap = turn.start_s - before.start_s - (before.api_s or 0.0)
        self.overlapping += gap < 0
        self._gaps[before.stop].append(max(0.0, gap))
        blocks = len(before.block_ids)
        kept = common_blocks(before.block_ids, turn.block_ids)
        if kept == blocks:
            self.appending += 1
            self._growth.append(turn.prompt_tokens - before.prompt_tokens)
        elif blocks - kept > FAR_BACK * blocks:
            self.pulling_back += 1

    def _add_digests(self, main: Flow) -> None:
        digest = hashlib.blake2b(digest_size=16)
        before = main.turns[0].block_ids[:0]
        for at, turn in enumerate(main.turns):
            # How much a prompt keeps of its predecessor and what is new say as much as all of its ids, in few bytes.
            kept = common_blocks(before, turn.block_ids)
            digest.update(struct.pack("<dqqq", turn.start_s, turn.prompt_tokens, turn.output_tokens, kept))
            digest.update(turn.block_ids[kept:].tobytes())
            before = turn.block_ids
            if at == len(main.turns) - 1:
                self._whole[digest.digest()] += 1
            else:
                self._proper_prefixes.add(digest.digest())
            if at == BEGINNING_TURNS - 1:
                self._beginnings[digest.digest()] += 1


def distribution(values: array[float]) -> Distribution:
    if not values:
        return Distribution(0, float("nan"), dict.fromkeys(PERCENTILES, float("nan")))
    data = np.frombuffer(values, dtype=np.float64)
    found = np.percentile(data, PERCENTILES)
    return Distribution(len(data), float(data.mean()), dict(zip(PERCENTILES, map(float, found), strict=True)))
