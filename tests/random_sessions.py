"""Small random sessions for property tests: branches, pull-backs, ties in time, subagents, tiny prompts."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from traces.model import MAIN_FLOW, BlockIds, BlockScope, Flow, Session, Turn

HEADS = [(0, 0), (3, 2), (6, 5), (2, 0)]


def turn(index: int, ids: list[int], prompt: int, output: int = 1, start_s: float = 0.0) -> Turn:
    return Turn(index, start_s, prompt, output, np.array(ids, dtype=np.int64))


@st.composite
def sessions(draw: st.DrawFn, name: str = "s", max_turns: int = 10) -> Session:
    """A valid session: ids are chained, one for each full block."""
    block = draw(st.sampled_from([2, 3, 4, 8]))
    flow_count = draw(st.integers(1, 3))
    heads = [draw(st.sampled_from(HEADS)) for _ in range(flow_count)]
    paths: list[BlockIds] = [np.empty(0, dtype=np.int64)]
    next_id = 1
    turns: list[list[Turn]] = [[] for _ in range(flow_count)]
    clocks = [0.0] * flow_count
    for number in range(draw(st.integers(1, max_turns))):
        flow = 0 if number == 0 else draw(st.integers(0, flow_count - 1))
        # Mostly a turn goes on from the latest prompt, else from any part of any earlier one.
        goes_on = draw(st.booleans())
        path = paths[-1] if goes_on else paths[draw(st.integers(0, len(paths) - 1))]
        kept = len(path) if goes_on else draw(st.integers(0, len(path)))
        # Up to 4 new blocks; an empty prompt does not exist.
        new = draw(st.integers(0, 4))
        tail = draw(st.integers(0 if kept + new else 1, block - 1))
        ids = np.concatenate([path[:kept], np.arange(next_id, next_id + new, dtype=np.int64)])
        next_id += new
        paths.append(ids)
        output = draw(st.integers(0, 3 * block))
        clocks[flow] += draw(st.sampled_from([0.0, 1.0, 2.5]))
        clock = max(clocks[flow], float(number))
        clocks[flow] = clock
        turns[flow].append(Turn(len(turns[flow]), clock, len(ids) * block + tail, output, ids))
    flows = [
        Flow(MAIN_FLOW if at == 0 else f"sub{at}", tuple(line), *heads[at], start_s=line[0].start_s)
        for at, line in enumerate(turns)
        if line
    ]
    return Session(name, block, BlockScope.SESSION, flows[0], tuple(flows[1:]))
