"""The one typed model of a multi-turn coding trace that every reader fills and everything else reads.

A *session* is one agent conversation. A *turn* is one request to the server: it repeats the whole
conversation so far and adds a little. A *subagent* is a second conversation that a session starts and that
runs beside it. A *flow* is one such line of turns: the session's main flow or one subagent.

Prompts are not stored as text but as ids of full blocks: ``block_ids[k]`` names the tokens
``[0, (k + 1) * block_size)`` of the prompt, that is, an id stands for its whole prefix (ids are *chained*).
Two prompts share exactly the leading blocks whose ids are equal. The last, partial block has no id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]

MAIN_FLOW = "main"


class BlockScope(StrEnum):
    """Where two equal block ids mean equal tokens."""

    SESSION = "session"  # ids are local to a session (Weka: hash_id_scope "local")
    GLOBAL = "global"  # ids are comparable across the whole trace (Mooncake)


class StopReason(StrEnum):
    """Why the recorded generation ended; it decides how soon the next turn comes."""

    TOOL_USE = "tool_use"
    END_TURN = "end_turn"
    UNKNOWN = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One recorded request.

    Attributes:
        index: position in its flow, from 0.
        start_s: recorded arrival in seconds since the session's first request.
        prompt_tokens: length of the prompt, in tokens (>= 1).
        output_tokens: recorded length of the answer, in tokens (0 occurs in the wild).
        block_ids: ids of the full blocks, int64, shape ``(prompt_tokens // block_size,)``.
        think_s: seconds between the previous answer and this request; None where the trace has none.
        api_s: recorded duration of the request in seconds; None where the trace has none.
        stop: recorded stop reason.
        model: recorded model name ("" where the trace has none).
    """

    index: int
    start_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: BlockIds
    think_s: float | None = None
    api_s: float | None = None
    stop: StopReason = StopReason.UNKNOWN
    model: str = ""


@dataclass(frozen=True, slots=True)
class Flow:
    """A line of turns, each starting after its predecessor ended.

    Attributes:
        name: ``MAIN_FLOW`` or the subagent's id, unique in the session.
        turns: at least one.
        tool_tokens: length of the tool definitions at the head of every prompt of this flow.
        system_tokens: length of the system prompt after them.
        spawn_after: index of the main turn whose end starts this flow; None for the main flow and for a
            subagent that starts with the session.
        join_before: index of the main turn that waits for this flow's end; None when nothing waits for it.
        start_s: recorded start in seconds since the session's first request.
        duration_s: recorded duration; None where the trace has none.
    """

    name: str
    turns: tuple[Turn, ...]
    tool_tokens: int = 0
    system_tokens: int = 0
    spawn_after: int | None = None
    join_before: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One recorded agent session.

    Attributes:
        id: unique in the trace.
        block_size: tokens per block.
        scope: where equal block ids mean equal tokens.
        main: the session's own turns.
        subagents: flows started by the session; they share its block namespace.
        source: file (and member or line) it was read from, for error messages.
    """

    id: str
    block_size: int
    scope: BlockScope
    main: Flow
    subagents: tuple[Flow, ...] = ()
    source: str = ""

    def flows(self) -> Iterator[Flow]:
        yield self.main
        yield from self.subagents

    def turns_in_arrival_order(self) -> list[tuple[Flow, Turn]]:
        """All turns of all flows by recorded arrival (``Flow.start_s`` is already part of ``Turn.start_s``)."""
        pairs = [(flow, turn) for flow in self.flows() for turn in flow.turns]
        return sorted(pairs, key=lambda pair: pair[1].start_s)

    @property
    def request_count(self) -> int:
        return sum(len(flow.turns) for flow in self.flows())

    @property
    def max_context(self) -> int:
        """Largest prompt plus output of any turn, in tokens."""
        return max(t.prompt_tokens + t.output_tokens for flow in self.flows() for t in flow.turns)


@dataclass(slots=True)
class ReadStats:
    """What a reader saw and skipped; filled while the sessions stream past."""

    sessions: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    skipped_sessions: int = 0
    skipped: list[str] = field(default_factory=list)  # one message per skipped session, with file and field
    notes: list[str] = field(default_factory=list)  # accepted oddities worth telling the user
    ignored: Counter[str] = field(default_factory=Counter)  # values of the format that the model has no place for


class TraceError(ValueError):
    """A faulty trace. The message names file, session, turn and field, and says what to do."""

    def __init__(
        self,
        message: str,
        *,
        file: str,
        session: str | None = None,
        flow: str | None = None,
        turn: int | None = None,
        field: str | None = None,
    ) -> None:
        where = [file]
        if session is not None:
            where.append(f"session {session}")
        if flow is not None and flow != MAIN_FLOW:
            where.append(f"subagent {flow}")
        if turn is not None:
            where.append(f"turn {turn}")
        if field is not None:
            where.append(f"field '{field}'")
        super().__init__(f"{', '.join(where)}: {message}")
        self.file = file
        self.session = session
        self.flow = flow
        self.turn = turn
        self.field = field
