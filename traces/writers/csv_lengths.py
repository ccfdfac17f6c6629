"""CSV of lengths: what spreadsheets read (``traces.readers.csv_lengths``).

Columns ``session_id, start_s, prompt_tokens, output_tokens, shared_tokens``; the last is what a prompt repeats of
the one before it. Subagents are sessions named ``SESSION/SUBAGENT``.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from traces.model import Session, Turn
from traces.readers.csv_lengths import BLOCK_SIZE
from traces.writers.base import BLOCKS, TraceWriter, Write, lengths_loss, loss_of, microseconds, register
from traces.writers.tracelab import flow_session_id, shared_tokens

_COLUMNS = ("session_id", "start_s", "prompt_tokens", "output_tokens", "shared_tokens")


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    with path.open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(_COLUMNS)

        def write(session: Session) -> None:
            for flow in session.flows():
                before: Turn | None = None
                for turn in flow.turns:
                    shared = shared_tokens(session, turn, before)
                    start = microseconds(turn.start_s)
                    name = " ".join(flow_session_id(session, flow).split())  # a row is a line
                    rows.writerow([name, f"{start:.6f}", turn.prompt_tokens, turn.output_tokens, shared])
                    before = turn

        yield write


def _loss(session: Session) -> Counter[str]:
    lost = loss_of(session, kept=frozenset(["id", "start_s"]), clock=False, subagents=False)
    lost[BLOCKS] = lengths_loss(session, BLOCK_SIZE)
    lost["id"] = session.id != " ".join(session.id.split())
    return +lost


register(TraceWriter("csv", (".csv",), _open, _loss))
