"""Mooncake format with sessions, as AIPerf reads it (``traces.readers.mooncake_sessions``): whole prompts with ids.

Like ``mooncake``, but requests of a session are linked, and ``delay`` says how long the client waited. Subagents
are sessions named ``SESSION/SUBAGENT``. ``context_mode`` tells AIPerf that each prompt is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from traces.model import Session
from traces.readers.files import LINE_FILES
from traces.readers.mooncake_sessions import MOONCAKE_BLOCK, WHOLE_PROMPTS
from traces.writers.base import TraceWriter, Write, line_file, loss_of, microseconds, register
from traces.writers.tracelab import flow_session_id


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    with line_file(path) as line:

        def write(session: Session) -> None:
            for flow in session.flows():
                for turn in flow.turns:
                    record: dict[str, Any] = {
                        "session_id": flow_session_id(session, flow),
                        "timestamp": microseconds(turn.start_s * 1000),
                        "input_length": turn.prompt_tokens,
                        "output_length": turn.output_tokens,
                        "hash_ids": turn.block_ids.tolist(),
                        "context_mode": WHOLE_PROMPTS,
                    }
                    if turn.think_s is not None:
                        record["delay"] = microseconds(turn.think_s * 1000)
                    if turn.model:
                        record["model"] = turn.model
                    line(orjson.dumps(record))

        yield write


def _loss(session: Session) -> Counter[str]:
    return loss_of(session, kept=frozenset(["id", "start_s", "think_s", "model"]), subagents=False)


register(TraceWriter("mooncake-sessions", LINE_FILES, _open, _loss, MOONCAKE_BLOCK, shared=True))
