"""What a finished run sent: its prompts, token by token, from the trace and the answers on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from traces.model import Session
from traces.replay.clients.base import Tokens
from traces.replay.record import RequestRecord, RunHeader
from traces.replay.store import Output, TurnKey, key_of
from traces.tokens import TokenBook

_NO_TOKENS: Tokens = np.empty(0, dtype=np.int32)


class Sent(NamedTuple):
    """One request as the server saw it. Token ids are int32; a request that failed may have no output."""

    record: RequestRecord
    prompt: Tokens
    output: Tokens


def sends_and_ends(records: Iterable[RequestRecord]) -> Iterator[tuple[RequestRecord, bool]]:
    """Each record twice, in order of time: when it was sent, and (True) when it ended."""
    kept = list(records)
    steps = [(record.sent_s, False, record) for record in kept] + [(record.done_s, True, record) for record in kept]
    for _, is_end, record in sorted(steps, key=lambda step: step[:2]):
        yield record, is_end


def sent_requests(
    header: RunHeader,
    sessions: Iterable[Session],
    records: Iterable[RequestRecord],
    outputs: Mapping[TurnKey, Output],
) -> list[Sent]:
    """Build the prompts of a run anew, in the order of sending.

    Args:
        header: of the run.
        sessions: what it replayed, after its limits (``traces.replay.run.replayed_sessions``).
        records: its records.
        outputs: its answers (``Run.outputs``).

    Raises:
        ValueError: the run was sent as text, so no tokens are known.
    """
    if header.server.client != "sglang" or header.vocab is None:
        raise ValueError(f"run {header.run_id} was sent as text: the tokens that the server saw are not known")
    by_id = {session.id: session for session in sessions}
    positions = {
        (session.id, flow.name, turn.index): position
        for session in by_id.values()
        for flow in session.flows()
        for position, turn in enumerate(flow.turns)
    }
    books: dict[str, TokenBook] = {}
    sent = []
    for record, is_end in sends_and_ends(records):
        if record.session not in books:
            books[record.session] = TokenBook(
                by_id[record.session],
                seed=header.seed,
                vocab=header.vocab,
                prefix_sharing=header.prefix_sharing,
                history=header.history,
            )
        output = outputs.get(key_of(record))
        tokens = _NO_TOKENS if output is None or isinstance(output, str) else output
        position = positions[key_of(record)]
        if not is_end:
            sent.append(Sent(record, books[record.session].prompt(record.flow, position), tokens))
        elif record.error is None and len(tokens):
            books[record.session].record_output(record.flow, position, tokens)
    return sent
