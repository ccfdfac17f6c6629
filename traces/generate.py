"""A seeded generator of coding sessions, for the demo and for tests without real traces.

The distributions were fitted to 413 recorded coding sessions (30,118 requests; ``docs/design/traces.md`` has
the comparison). What matters for a prefix cache is kept: how much of a prompt survives to the next turn, how
soon that turn comes given why the last answer ended, how sessions end, how fast contexts grow, and that
subagents run beside their parent. Contents are not modelled; there are none in a trace.

Sizes are in tokens of the recorded models and are multiplied by ``scale``; times are not scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from traces.model import MAIN_FLOW, BlockIds, BlockScope, Flow, Session, StopReason, Turn
from traces.spawn import attach

MODEL = "generated"
SUBAGENT_MODEL = "generated-small"

# A turn either keeps the whole previous prompt, loses its last block or two, or goes back further.
P_LOSE_TAIL = 0.053
P_PULL_BACK = 0.0150  # compaction at the context limit adds to it
P_REWRITE = 0.65  # of the pull-backs: same size again (an early message changed); else a compaction

P_END_TURN_AFTER = {StopReason.TOOL_USE: 0.05, StopReason.END_TURN: 0.20}
P_SESSION_ENDS_AFTER = {StopReason.TOOL_USE: 0.0075, StopReason.END_TURN: 0.13}

P_RESUMED = 0.29  # sessions that start with a long history
MAX_GAP_S = 75_600.0  # longest recorded gap: 21 hours
# Recorded models had two limits; a prompt that would exceed its limit is compacted.
CONTEXT_LIMITS, P_LONG_CONTEXT = (190_000, 900_000), 0.25


class GeneratorSettings(BaseModel):
    """What to generate; ``generated:name=value,...`` sets these fields.

    Attributes:
        sessions: how many.
        seed: same settings and seed, same sessions; session n does not depend on how many there are.
        scale: factor on all token counts.
        block_size: tokens per block.
        max_turns: longest main flow; 0 for no limit.
        max_context: prompts beyond this many tokens (after scaling) are compacted; 0 for the recorded limits.
        subagent_rate: probability that a turn with a tool call starts a subagent.
        setups: how many different tools + system set-ups the sessions use.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sessions: Annotated[int, Field(ge=1)] = 20
    seed: Annotated[int, Field(ge=0)] = 1
    scale: Annotated[float, Field(gt=0, le=100)] = 1.0
    block_size: Annotated[int, Field(ge=1)] = 64
    max_turns: Annotated[int, Field(ge=0)] = 0
    max_context: Annotated[int, Field(ge=0)] = 0
    subagent_rate: Annotated[float, Field(ge=0, le=1)] = 0.001
    setups: Annotated[int, Field(ge=1)] = 8


PRESETS = {
    "default": GeneratorSettings(),
    # Fits a context of 4,096 tokens: the demo's model on a CPU.
    "tiny": GeneratorSettings(
        scale=1 / 32, block_size=16, max_turns=12, max_context=3_000, subagent_rate=0.05, setups=3
    ),
}


def generate_sessions(settings: GeneratorSettings) -> Iterator[Session]:
    """Stream ``settings.sessions`` sessions, each valid by the readers' own checks."""
    for number in range(settings.sessions):
        yield _SessionMaker(settings, number).session()


class _Ids:
    """Hands out the block ids of one session, as a trace does: 1, 2, 3, ..."""

    def __init__(self) -> None:
        self._next = 1

    def fresh(self, count: int) -> BlockIds:
        ids = np.arange(self._next, self._next + count, dtype=np.int64)
        self._next += count
        return ids

    def follow(self, path: BlockIds, kept: int, prompt_tokens: int, block_size: int) -> BlockIds:
        """Ids of a prompt that shares the first ``kept`` blocks of ``path``."""
        full = prompt_tokens // block_size
        kept = min(kept, full, len(path))
        return np.concatenate([path[:kept], self.fresh(full - kept)])


class _SessionMaker:
    def __init__(self, settings: GeneratorSettings, number: int) -> None:
        self._settings = settings
        self._name = f"generated-{settings.seed}-{number:05d}"
        self._rng = np.random.default_rng([settings.seed, number, 1])
        self._ids = _Ids()
        setup = np.random.default_rng([settings.seed, int(self._rng.integers(settings.setups)), 2])
        self._tools = self._tokens(float(np.clip(setup.normal(12_600, 1_200), 8_000, 17_000)))
        self._system = self._tokens(float(np.clip(setup.normal(2_900, 700), 800, 6_000)))
        self._subagent_tools = self._tokens(float(setup.normal(7_800, 200)))
        self._subagent_system = self._tokens(float(setup.normal(900, 80)))
        self._subagent_path: BlockIds = np.empty(0, dtype=np.int64)
        limit = CONTEXT_LIMITS[int(self._rng.random() < P_LONG_CONTEXT)]
        self._limit = settings.max_context or self._tokens(limit)

    def session(self) -> Session:
        turns: list[Turn] = []
        spawned: list[int] = []
        size = min(self._first_prompt(), self._limit)
        while True:
            turns.append(self._turn(turns, size))
            last = turns[-1]
            if last.stop is StopReason.TOOL_USE and self._rng.random() < self._settings.subagent_rate:
                spawned.append(last.index)
            if self._rng.random() < P_SESSION_ENDS_AFTER[last.stop] or len(turns) == self._settings.max_turns:
                break
            size = last.prompt_tokens + last.output_tokens + self._growth(last.stop)
        main = Flow(MAIN_FLOW, tuple(turns), self._tools, self._system)
        # Last, so that block ids of the main flow do not depend on the subagents.
        subagents = tuple(self._subagent(f"agent_{n:03d}", turns, at) for n, at in enumerate(spawned, 1))
        return Session(
            id=self._name,
            block_size=self._settings.block_size,
            scope=BlockScope.SESSION,
            main=main,
            subagents=subagents,
            source=f"generated:seed={self._settings.seed}",
        )

    def _turn(self, before: list[Turn], size: int) -> Turn:
        path, kept, start, think = np.empty(0, dtype=np.int64), 0, 0.0, 0.0
        stop_before = StopReason.END_TURN
        if before:
            last = before[-1]
            stop_before = last.stop
            path = last.block_ids
            kept, size = self._kept(last, size)
            think = self._gap(stop_before)
            start = round(last.start_s + (last.api_s or 0.0) + think, 3)
        ends = self._rng.random() < P_END_TURN_AFTER[stop_before]
        stop = StopReason.END_TURN if ends else StopReason.TOOL_USE
        output = self._output(stop)
        ids = self._ids.follow(path, kept, size, self._settings.block_size)
        return Turn(len(before), start, size, output, ids, think, self._api(output), stop, MODEL)

    def _kept(self, last: Turn, size: int) -> tuple[int, int]:
        """(blocks of the previous prompt that survive, size of this prompt)."""
        blocks = len(last.block_ids)
        event = self._rng.random()
        compact = size > self._limit
        if compact or event < P_PULL_BACK:
            # Mostly only the head survives; the median share kept in recorded sessions is 0.11.
            share = float(np.clip(self._lognormal(0.11, 1.0), 0.02, 0.88))
            if compact or self._rng.random() > P_REWRITE:
                size = round(size * self._rng.uniform(0.12, 0.5))
            kept = int(blocks * share)
        elif event < P_PULL_BACK + P_LOSE_TAIL:
            kept = blocks - int(self._rng.integers(1, 3))
            size += self._settings.block_size
        else:
            return blocks, size
        return max(0, kept), max(1, min(size, self._limit))

    def _subagent(self, name: str, main: list[Turn], spawned_by: int) -> Flow:
        spawner = main[spawned_by]
        begin = spawner.start_s + (spawner.api_s or 0.0) + float(self._rng.uniform(0.05, 2.0))
        begin = round(begin, 3)
        head = self._subagent_tools + self._subagent_system
        size = min(head + self._tokens(float(self._rng.uniform(700, 2_000))), self._limit)
        # Subagents of one set-up share its head, but nothing with their parent.
        path, kept = self._subagent_path, head // self._settings.block_size
        turns: list[Turn] = []
        clock, think = begin, 0.0
        count = int(np.clip(self._rng.geometric(0.09), 2, 30))
        for index in range(count):
            output = self._output(StopReason.TOOL_USE)
            ids = self._ids.follow(path, kept, size, self._settings.block_size)
            stop = StopReason.END_TURN if index == count - 1 else StopReason.TOOL_USE
            turns.append(Turn(index, clock, size, output, ids, think, self._api(output), stop, SUBAGENT_MODEL))
            think = round(float(self._lognormal(2.0, 0.8)), 3)
            clock = round(begin + (clock - begin) + (turns[-1].api_s or 0.0) + think, 3)
            path, kept = ids, len(ids)
            size += output + self._tokens(self._lognormal(900, 1.4))
            if size > self._limit:
                break
        self._subagent_path = turns[0].block_ids
        end = turns[-1].start_s + (turns[-1].api_s or 0.0)
        duration = round(end - begin + float(self._rng.uniform(0, 20)), 3)
        spawn_after, join_before = attach(begin, begin + duration, main)
        return Flow(
            name,
            tuple(turns),
            self._subagent_tools,
            self._subagent_system,
            spawn_after,
            join_before,
            begin,
            duration,
        )

    def _first_prompt(self) -> int:
        head = self._tools + self._system
        if not self._settings.max_turns and self._rng.random() < P_RESUMED:
            return head + self._tokens(self._lognormal(140_000, 0.75))
        return head + self._tokens(self._lognormal(5_000, 0.6))

    def _growth(self, stop: StopReason) -> int:
        """New tokens of a tool's result or a user's message, beyond the answer before it."""
        return self._tokens(self._lognormal(320 if stop is StopReason.TOOL_USE else 110, 1.72))

    def _output(self, stop: StopReason) -> int:
        if stop is StopReason.TOOL_USE:
            return self._tokens(min(60 + self._lognormal(150, 1.35), 32_000))
        return self._tokens(min(self._lognormal(370, 0.9), 32_000))

    def _gap(self, stop: StopReason) -> float:
        """Seconds between an answer and the next turn: median 9, p90 71 after a tool call; 210, 2,980 else."""
        if stop is StopReason.END_TURN:
            gap = self._lognormal(210, 2.07)
        elif self._rng.random() < 0.8:
            gap = 2 + self._lognormal(5.6, 0.7)
        else:  # slow tools: builds, tests, a user's permission
            gap = self._lognormal(71, 1.3)
        return round(min(gap, MAX_GAP_S), 3)

    def _api(self, output: int) -> float:
        """Seconds a request took: a linear fit on the answer's length, with its spread."""
        recorded = output / self._settings.scale
        return round((3.0 + 0.0154 * recorded) * self._lognormal(1.0, 0.25), 3)

    def _lognormal(self, median: float, sigma: float) -> float:
        return float(median * np.exp(sigma * self._rng.standard_normal()))

    def _tokens(self, recorded: float) -> int:
        return max(1, round(recorded * self._settings.scale))
