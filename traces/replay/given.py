"""Prompts given token by token, in place of those made from a trace's block ids.

For traffic whose tokens mean something: a conversation rendered with the server's own chat template, or one written to
plant a cause. ``replay(config, given=...)`` sends them and keeps them in the run, because nothing can make them anew::

    RUN/prompts.jsonl   {"session": ..., "flow": ..., "turn": ..., "tokens": [...]}   a line a turn
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from traces.model import MAIN_FLOW, BlockScope, Flow, Session, StopReason, Turn
from traces.replay.store import RunError, TurnKey
from traces.tokens import TokenIds

PROMPTS = "prompts.jsonl"


class GivenTurn(NamedTuple):
    """One request: its prompt, and how long an answer is asked for (>= 1 token)."""

    prompt: Sequence[int]
    answer_tokens: int = 1
    think_s: float = 0.0  # after the answer before it, or what spawned it; a main flow's first turn waits for nothing
    stop: StopReason = StopReason.TOOL_USE


class GivenFlow(NamedTuple):
    """A line of turns; a subagent is spawned after, and joined before, a turn of the main flow (by index)."""

    turns: Sequence[GivenTurn]
    spawn_after: int | None = None
    join_before: int | None = None


class GivenPrompts(NamedTuple):
    """What a run sends: sessions for order and time, tokens by (session, flow, turn), int32 of shape (n,)."""

    sessions: list[Session]
    tokens: Mapping[TurnKey, TokenIds]


class GivenBook:
    """The prompts of one session, as ``traces.tokens.TokenBook`` has them."""

    def __init__(self, session: Session, tokens: Mapping[TurnKey, TokenIds]) -> None:
        self._turns = {
            flow.name: [(session.id, flow.name, turn.index) for turn in flow.turns] for flow in session.flows()
        }
        self._tokens = tokens

    def prompt(self, flow_name: str, turn_index: int) -> TokenIds:
        return self._tokens[self._turns[flow_name][turn_index]]

    def record_output(self, flow_name: str, turn_index: int, tokens: TokenIds) -> None:
        """The history is given, too: answers of the server are no part of it."""


def given_prompts(conversations: Mapping[str, Mapping[str, GivenFlow]], *, block_size: int = 64) -> GivenPrompts:
    """Sessions of given prompts, by session and flow; one flow of each is ``MAIN_FLOW``.

    Args:
        block_size: tokens of a block of the sessions; ids are equal where all tokens up to the block's end are.

    Raises:
        ValueError: a session without a main flow, a flow without turns, or an empty prompt; names it.
    """
    ids: dict[bytes, int] = {}
    sessions, tokens = [], {}
    for name, flows in conversations.items():
        if MAIN_FLOW not in flows:
            raise ValueError(f"session {name!r}: none of its flows is called {MAIN_FLOW!r}")
        made = {}
        main_starts = list(accumulate(turn.think_s for turn in flows[MAIN_FLOW].turns))
        for flow, given in flows.items():
            for index, turn in enumerate(given.turns):
                if not len(turn.prompt) or turn.answer_tokens < 1:
                    raise ValueError(
                        f"session {name!r}, flow {flow!r}, turn {index}: give a prompt and ask for an answer"
                    )
                tokens[name, flow, index] = np.asarray(turn.prompt, dtype=np.int32)
            if not given.turns:
                raise ValueError(f"session {name!r}, flow {flow!r}: it has no turns")
            begin = 0.0 if given.spawn_after is None else main_starts[given.spawn_after]
            starts = accumulate(turn.think_s for turn in given.turns)
            made[flow] = Flow(
                name=flow,
                turns=tuple(
                    _turn(index, turn, begin + start, _block_ids(tokens[name, flow, index], block_size, ids))
                    for index, (turn, start) in enumerate(zip(given.turns, starts, strict=True))
                ),
                spawn_after=given.spawn_after,
                join_before=given.join_before,
                start_s=begin,
            )
        main = made.pop(MAIN_FLOW)
        sessions.append(Session(name, block_size, BlockScope.GLOBAL, main, tuple(made.values()), "given prompts"))
    return GivenPrompts(sessions, tokens)


def _turn(index: int, turn: GivenTurn, start_s: float, block_ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Turn:
    return Turn(
        index=index,
        start_s=start_s,
        prompt_tokens=len(turn.prompt),
        output_tokens=turn.answer_tokens,
        block_ids=block_ids,
        think_s=turn.think_s,
        api_s=0.0,  # so that nothing of a pause counts as serving time
        stop=turn.stop,
    )


def _block_ids(tokens: TokenIds, block_size: int, ids: dict[bytes, int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    ends = range(block_size, len(tokens) + 1, block_size)
    return np.array([ids.setdefault(tokens[:end].tobytes(), len(ids)) for end in ends], dtype=np.int64)


def write_prompts(run: Path, tokens: Mapping[TurnKey, TokenIds]) -> None:
    with (run / PROMPTS).open("wb") as file:
        for (session, flow, turn), prompt in tokens.items():
            line = {"session": session, "flow": flow, "turn": turn, "tokens": prompt}
            file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")


def read_prompts(run: Path) -> dict[TurnKey, TokenIds]:
    """The prompts that a run was given; empty where they were made from block ids.

    Raises:
        RunError: a faulty line; names file and line.
    """
    file = run / PROMPTS
    if not file.exists():
        return {}
    return dict(_prompts(file, file.read_bytes().splitlines()))


def _prompts(file: Path, lines: Iterable[bytes]) -> Iterable[tuple[TurnKey, TokenIds]]:
    for number, line in enumerate(lines, start=1):
        try:
            raw = orjson.loads(line)
            yield (raw["session"], raw["flow"], raw["turn"]), np.array(raw["tokens"], dtype=np.int32)
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{file}, line {number}: {error!r}; the file was damaged after it was written; remove it to report "
                "without what clients changed in their texts"
            ) from error
