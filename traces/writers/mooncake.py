"""Mooncake format: one request a line, global ids of 512-token blocks (``traces.readers.mooncake``).

Holds lengths, arrival times and shared prefixes in whole blocks of 512 tokens. Requests stand session by session;
where sessions have clocks of their own, each starts at 0, so sort or shift them for a replay by time. The id of a
partial last block is written too, as the format has one, and shared with no other prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from traces.model import Session
from traces.readers.files import LINE_FILES
from traces.readers.mooncake import BLOCK_SIZE
from traces.writers.base import TraceWriter, Write, line_file, loss_of, microseconds, register


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    partial = 1 << 62  # ids of partial blocks: above all others

    with line_file(path) as line:

        def write(session: Session) -> None:
            nonlocal partial
            for _, turn in session.turns_in_arrival_order():
                ids = turn.block_ids.tolist()
                if turn.prompt_tokens % BLOCK_SIZE:
                    ids.append(partial)
                    partial += 1
                record = {
                    "timestamp": microseconds(turn.start_s * 1000),
                    "input_length": turn.prompt_tokens,
                    "output_length": turn.output_tokens,
                    "hash_ids": ids,
                }
                line(orjson.dumps(record))

        yield write


def _loss(session: Session) -> Counter[str]:
    lost = loss_of(session, kept=frozenset(["start_s"]), conversations=False)
    lost["subagents (read as requests of no session)"] = len(session.subagents)
    return +lost


register(TraceWriter("mooncake", LINE_FILES, _open, _loss, BLOCK_SIZE, shared=True))
