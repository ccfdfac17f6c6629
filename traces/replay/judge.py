"""What is to be said of an answer that arrived: pure, for the engine's records."""

from __future__ import annotations

import hashlib

import numpy as np

from traces.replay.clients.base import Call, Client, Outcome
from traces.replay.record import RequestError
from traces.replay.store import Output


def fault_of(outcome: Outcome, call: Call, client: Client) -> RequestError | None:
    """What is wrong with an answer that arrived whole."""
    if client.exact_prompt and outcome.prompt_tokens != len(call.prompt):
        return RequestError(
            kind="length_mismatch",
            message=f"the server counted {outcome.prompt_tokens} prompt tokens, {len(call.prompt)} were sent",
        )
    if client.exact_output and outcome.output_tokens < call.max_tokens:
        return RequestError(
            kind="short_output",
            message=f"{outcome.output_tokens} of {call.max_tokens} tokens came (finish reason {outcome.finish_reason})",
        )
    return None


def output_of(outcome: Outcome) -> Output | None:
    """Token ids where the protocol carries them, else text."""
    return outcome.output_text if outcome.output_ids is None else outcome.output_ids


def digest_of(output: Output | None) -> str | None:
    """SHA-256 of the output: of its text in UTF-8, or of its token ids as little-endian int32."""
    if output is None or not len(output):
        return None
    raw = output.encode() if isinstance(output, str) else output.astype(np.dtype("<i4"), copy=False).tobytes()
    return hashlib.sha256(raw).hexdigest()
