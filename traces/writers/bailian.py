"""Qwen-Bailian format: one request a line, conversations linked, ids of 16-token blocks (``traces.readers.bailian``).

Holds lengths, arrival times, which requests follow each other, and shared prefixes in blocks of 16 tokens, tails
included. Requests stand session by session; subagents are conversations of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from traces.model import Session
from traces.readers.bailian import BLOCK_SIZE, NO_PARENT
from traces.readers.files import LINE_FILES
from traces.writers.base import TraceWriter, Write, line_file, loss_of, microseconds, register


@contextmanager
def _open(path: Path) -> Iterator[Write]:
    chat = 0

    with line_file(path) as line:

        def write(session: Session) -> None:
            nonlocal chat
            for flow in session.flows():
                parent = NO_PARENT
                for number, turn in enumerate(flow.turns, 1):
                    record = {
                        "chat_id": chat,
                        "parent_chat_id": parent,
                        "timestamp": microseconds(turn.start_s),
                        "input_length": turn.prompt_tokens,
                        "output_length": turn.output_tokens,
                        "type": "text",
                        "turn": number,
                        "hash_ids": turn.block_ids.tolist(),
                    }
                    line(orjson.dumps(record))
                    parent, chat = chat, chat + 1

        yield write


def _loss(session: Session) -> Counter[str]:
    return loss_of(session, kept=frozenset(["start_s"]), subagents=False)


register(TraceWriter("bailian", LINE_FILES, _open, _loss, BLOCK_SIZE, shared=True))
