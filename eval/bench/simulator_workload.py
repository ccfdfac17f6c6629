"""From a trace to the simulator's workload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from radix_cache.features import Stop
from radix_cache.simulator import FlowSpec, TurnSpec, Workload, WorkloadBuilder
from traces.model import BlockIds, BlockScope, Flow, Session, StopReason
from traces.replay.schedule import joined_flows, recorded_think_s, spawning_turn
from traces.tree import SessionTree

STOPS = {StopReason.TOOL_USE: Stop.TOOL, StopReason.END_TURN: Stop.TURN, StopReason.UNKNOWN: Stop.UNKNOWN}

_NO_BLOCKS: BlockIds = np.empty(0, dtype=np.int64)


def workload_from_sessions(
    sessions: Iterable[Session], *, page_size: int | None = None, share_heads: bool = False
) -> Workload:
    """Read sessions one by one into a workload; what is read of a session is dropped before the next.

    Args:
        sessions: as ``traces.open_trace`` yields them; all of one block size and scope.
        page_size: tokens per page, a multiple of the trace's block size; None takes the block size.
        share_heads: sessions of one tools + system set-up share these tokens (``traces.tokens``, rule 5).

    Raises:
        ValueError: no session, block sizes that differ, or a page size that no number of blocks fills.
    """
    builder: WorkloadBuilder | None = None
    kind: tuple[int, BlockScope] | None = None
    for session in sessions:
        if builder is None or kind is None:
            kind = (session.block_size, session.scope)
            size = session.block_size if page_size is None else page_size
            if size < 1 or size % session.block_size:
                raise ValueError(
                    f"page size {size} is no multiple of the trace's block size {session.block_size}: block ids do "
                    "not tell where inside a block two prompts part"
                )
            builder = WorkloadBuilder(size, global_ids=session.scope is BlockScope.GLOBAL)
        elif (session.block_size, session.scope) != kind:
            raise ValueError(
                f"{session.source}, session {session.id}: block size {session.block_size} and scope {session.scope} "
                f"differ from {kind[0]} and {kind[1]} before it; simulate such traces apart"
            )
        builder.add(session.id, flow_specs(session, builder.page_size, share_heads=share_heads))
    if builder is None:
        raise ValueError("the trace has no sessions")
    return builder.build()


def flow_specs(session: Session, page_size: int, *, share_heads: bool) -> list[FlowSpec]:
    """A session's flows for the simulator, the main one first; timing follows ``traces.replay.schedule``."""
    tree = SessionTree.of(session) if session.scope is BlockScope.SESSION else None
    joins = {flow.name: k for k in range(len(session.main.turns)) for flow in joined_flows(session, k)}
    return [
        FlowSpec(
            list(_turn_specs(session, flow, tree, page_size, share_heads)),
            spawn_after=None if flow is session.main else spawning_turn(session, flow),
            join_before=joins.get(flow.name),
        )
        for flow in session.flows()
    ]


def _turn_specs(
    session: Session, flow: Flow, tree: SessionTree | None, page_size: int, share_heads: bool
) -> Iterator[TurnSpec]:
    blocks = page_size // session.block_size
    for position, turn in enumerate(flow.turns):
        full = turn.prompt_tokens // page_size * blocks
        kv = (turn.prompt_tokens + max(turn.output_tokens - 1, 0)) // page_size * blocks
        answer = _NO_BLOCKS if tree is None else answer_blocks(tree, turn.block_ids, kv)[full:]
        head = None
        if share_heads and tree is not None:
            length, name = tree.head(turn.block_ids, turn.prompt_tokens)
            head = (name, min(length, turn.prompt_tokens) // page_size)
        yield TurnSpec(
            turn.prompt_tokens,
            turn.output_tokens,
            turn.block_ids[:full][blocks - 1 :: blocks],
            answer[blocks - 1 :: blocks],
            recorded_think_s(session, flow, position),
            turn.api_s,
            STOPS[turn.stop],
            head,
        )


def answer_blocks(tree: SessionTree, prompt: BlockIds, length: int) -> BlockIds:
    """The prompt's block ids and those its answer fills, up to ``length`` in all, as far as later prompts go."""
    if length <= len(prompt):
        return prompt
    node = int(prompt[-1]) if len(prompt) else -1
    more: list[int] = []
    while len(prompt) + len(more) < length:
        child = tree.first_child.get(node)
        if child is None:
            break
        more.append(child)
        node = child
    return np.concatenate((prompt, np.array(more, dtype=np.int64)))
