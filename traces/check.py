"""What a session must fulfil, whatever file it came from: the rules that all behind the readers rely on. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radix_cache.theory import ROOT, common_blocks
from traces.model import MAIN_FLOW, Flow, Session


class Problem(NamedTuple):
    """A rule that a session breaks."""

    flow: str
    turn: int | None
    message: str


def problems(session: Session) -> list[Problem]:
    """All broken rules of one session; none in what ``open_trace`` gives out."""
    return list(_problems(session))


def _problems(session: Session) -> Iterator[Problem]:
    if session.block_size < 1:
        yield Problem(MAIN_FLOW, None, f"block size is {session.block_size}")
        return
    if session.main.name != MAIN_FLOW:
        yield Problem(session.main.name, None, "the main flow has another name")
    names = [flow.name for flow in session.flows()]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(name, None, "several flows have this name")
    parents: dict[int, int] = {}
    last_main = session.main.turns[-1].index if session.main.turns else -1
    for flow in session.flows():
        yield from _flow_problems(session, flow, last_main)
        yield from _chain_problems(flow, parents)


def _flow_problems(session: Session, flow: Flow, last_main: int) -> Iterator[Problem]:
    if not flow.turns:
        yield Problem(flow.name, None, "has no turns")
    for tokens, what in ((flow.tool_tokens, "tool"), (flow.system_tokens, "system")):
        if tokens < 0:
            yield Problem(flow.name, None, f"{what} tokens are {tokens}")
    for name, at in (("spawn_after", flow.spawn_after), ("join_before", flow.join_before)):
        if at is not None and not (flow.name != MAIN_FLOW and 0 <= at <= last_main):
            yield Problem(flow.name, None, f"{name} is {at}, no turn of the main flow")
    if flow.spawn_after is not None and flow.join_before is not None and flow.join_before <= flow.spawn_after:
        yield Problem(flow.name, None, "is joined no later than it is spawned")
    start, index = 0.0, -1
    for turn in flow.turns:
        if turn.index <= index:
            yield Problem(flow.name, turn.index, "turns are not numbered upwards")
        if not np.isfinite(turn.start_s) or turn.start_s < start:
            yield Problem(flow.name, turn.index, f"starts at {turn.start_s} s, before its predecessor or the session")
        if turn.prompt_tokens < 1 or turn.output_tokens < 0:
            yield Problem(
                flow.name, turn.index, f"has {turn.prompt_tokens} prompt and {turn.output_tokens} output tokens"
            )
        blocks = turn.prompt_tokens // session.block_size
        if turn.block_ids.dtype != np.int64 or turn.block_ids.shape != (blocks,):
            yield Problem(flow.name, turn.index, f"needs {blocks} block ids, has {turn.block_ids.shape}")
        for seconds in (turn.think_s, turn.api_s):
            if seconds is not None and not (np.isfinite(seconds) and seconds >= 0):
                yield Problem(flow.name, turn.index, f"waits or runs {seconds} s")
        start, index = max(start, turn.start_s), turn.index


def _chain_problems(flow: Flow, parents: dict[int, int]) -> Iterator[Problem]:
    before = np.empty(0, dtype=np.int64)
    for turn in flow.turns:
        kept = common_blocks(before, turn.block_ids)
        parent = int(turn.block_ids[kept - 1]) if kept else ROOT
        for block in turn.block_ids[kept:].tolist():
            if block < 0 or parents.setdefault(block, parent) != parent:
                yield Problem(flow.name, turn.index, f"block id {block} does not name one prefix")
                break
            parent = block
        before = turn.block_ids
