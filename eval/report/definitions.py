"""The definitions of a report: one function each, whose docstring is the text that every output prints.

A level says how many tokens of one prompt hit. All levels are counted in whole requests over the same set of
requests and divided by the same prompt tokens, so differences of levels are differences of rates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from radix_cache.rates import hit_tokens
from traces.replay.record import RequestRecord


def definition(function: Callable[..., object]) -> str:
    """The docstring of a definition as one line of text."""
    return " ".join((function.__doc__ or "").split())


# Levels: (record, page size) -> hit tokens.


def ideal(record: RequestRecord, page_size: int) -> int:
    """Infinite cache, instant insertion, page size 1: the longest common prefix with any earlier request of
    the run, its answer included, whichever session sent it. The last prompt token never hits."""
    return hit_tokens(record.shared_output_lcp, record.prompt_tokens, 1)


def aligned(record: RequestRecord, page_size: int) -> int:
    """Theoretical rate: as ideal, but only whole pages of the server's page size hit."""
    return hit_tokens(record.shared_output_lcp, record.prompt_tokens, page_size)


def per_session(record: RequestRecord, page_size: int) -> int:
    """As page-aligned, but a request hits only what earlier requests of its own session left behind (answers
    included)."""
    return hit_tokens(record.session_output_lcp, record.prompt_tokens, page_size)


def prompts_only(record: RequestRecord, page_size: int) -> int:
    """As page-aligned, but answers are not inserted: only earlier prompts can be hit, of any session."""
    return hit_tokens(record.shared_lcp, record.prompt_tokens, page_size)


def per_session_prompts_only(record: RequestRecord, page_size: int) -> int:
    """As per session, but answers are not inserted: only earlier prompts of the same session can be hit."""
    return hit_tokens(record.session_lcp, record.prompt_tokens, page_size)


def ready(record: RequestRecord, page_size: int) -> int:
    """As page-aligned, but only what had been computed before this request was sent can be hit."""
    return hit_tokens(record.ready_lcp, record.prompt_tokens, page_size)


def realized(record: RequestRecord, page_size: int) -> int:
    """Cached prompt tokens as the server reported them, over all its tiers; never computed by the report."""
    if record.cached_tokens is None:
        raise ValueError("the server reported no cached tokens for this request")
    return record.cached_tokens


class Level(NamedTuple):
    key: str  # stable name in the JSON
    title: str  # name shown to people
    tokens: Callable[[RequestRecord, int], int]


IDEAL = Level("ideal", "ideal", ideal)
ALIGNED = Level("aligned", "theoretical (page-aligned)", aligned)
READY = Level("ready", "ready", ready)
REALIZED = Level("realized", "realized", realized)
PER_SESSION = Level("per_session", "theoretical, per session", per_session)
PROMPTS_ONLY = Level("prompts_only", "theoretical, answers not inserted", prompts_only)
PER_SESSION_PROMPTS_ONLY = Level(
    "per_session_prompts_only", "theoretical, per session, answers not inserted", per_session_prompts_only
)

THEORY = (IDEAL, ALIGNED, READY, PER_SESSION, PROMPTS_ONLY, PER_SESSION_PROMPTS_ONLY)


# The chain: why a level is lower than the one above it.


class Step(NamedTuple):
    key: str
    title: str
    upper: Level
    lower: Level
    definition: str


CHAIN = (
    Step(
        "page_alignment",
        "page alignment",
        IDEAL,
        ALIGNED,
        "Tokens after the last whole page of the common prefix.",
    ),
    Step(
        "not_ready",
        "not ready in time",
        ALIGNED,
        READY,
        "Tokens that an earlier request shares but had not finished computing when this request was sent.",
    ),
    Step(
        "not_attributed",
        "evicted or not admitted (not attributed in this version)",
        READY,
        REALIZED,
        "Tokens that had been computed and yet did not hit. Negative where the server hit more than was "
        "ready when the request was sent: a request that waits in the server's queue can hit what is "
        "computed meanwhile.",
    ),
)


# Other numbers.


def rate(hit: int, prompt: int) -> float:
    """Sum of hit tokens / sum of prompt tokens, prompt tokens only, over the compared requests."""
    return hit / prompt if prompt else 0.0


def mean_request_rate(rates: list[float]) -> float:
    """Mean of the per-request rates. Not the hit rate: it weighs a short prompt as much as a long one. Never
    compare it with a rate above."""
    return sum(rates) / len(rates)


def ttft(record: RequestRecord) -> float | None:
    """Time to first token: from sending the request to its first output token, in seconds."""
    return None if record.first_token_s is None else record.first_token_s - record.sent_s


def tpot(record: RequestRecord) -> float | None:
    """Time per output token after the first: (end - first token) / (output tokens - 1), in seconds; requests
    with at least 2 output tokens."""
    if record.first_token_s is None or record.output_tokens < 2:
        return None
    return (record.done_s - record.first_token_s) / (record.output_tokens - 1)


def e2e(record: RequestRecord) -> float | None:
    """End to end: from sending the request to its last output token, in seconds."""
    return record.done_s - record.sent_s


def queue(record: RequestRecord) -> float | None:
    """Queue: from the server's queue to its first pass, in seconds, as the server said: for memory, for a step that
    another request runs, and for admission. Part of the time to first token."""
    return record.queued_s


def client_lag(record: RequestRecord) -> float | None:
    """Client lag: from the moment the request was due (previous end + think time) to sending it, in seconds.
    It is the replayer's own delay, not the server's."""
    return record.sent_s - record.ready_s


class Metric(NamedTuple):
    key: str
    title: str
    seconds: Callable[[RequestRecord], float | None]


TTFT = Metric("ttft", "TTFT", ttft)
TPOT = Metric("tpot", "TPOT", tpot)
E2E = Metric("e2e", "E2E", e2e)
QUEUE = Metric("queue", "queue", queue)
CLIENT_LAG = Metric("client_lag", "client lag", client_lag)
LATENCIES = (TTFT, QUEUE, TPOT, E2E, CLIENT_LAG)

HIT_SPLIT = 0.5  # hit fraction of a prompt that parts the "mostly hit" latencies from the others


def mostly_hit(record: RequestRecord) -> bool | None:
    """Groups: hit >= 50 % where the server reported at least half of the prompt as cached, else hit < 50 %; a
    request without a usable count is in neither."""
    if record.cached_tokens is None or not 0 <= record.cached_tokens <= record.prompt_tokens:
        return None
    return record.cached_tokens >= HIT_SPLIT * record.prompt_tokens
