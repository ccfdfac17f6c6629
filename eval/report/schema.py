"""What a report contains: the JSON written by ``agentserve report``, and the input of the renderers.

Stable: a field keeps its name and meaning within one ``schema_version``; new fields may be added. Rates are
fractions 0..1, times are seconds, lengths are tokens. A number that cannot be formed is null, never 0 or NaN.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from eval.report.schema_causes import AttributionReport
from eval.report.schema_what_if import WhatIf

SCHEMA_VERSION = 1

Status = Literal["finished", "interrupted", "server_lost", "incomplete"]


class ReportError(ValueError):
    """A run that cannot be reported. The message names file, line or request, and says what to do."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunInfo(_Model):
    run_id: str
    started: str  # ISO 8601, UTC
    agentserve_version: str
    client: str
    base_url: str
    engine_version: str | None
    model: str | None
    kv_capacity_tokens: int | None
    concurrency: int
    think: dict[str, Any]
    history: str
    prefix_sharing: str
    over_limit: str
    seed: int


class DataSet(_Model):
    trace: str
    format: str
    sha256: str  # digest of what was replayed, after filter and reduction
    filter: dict[str, Any]
    tokens_per_block: int
    recorded_block_size: int
    reduction: str  # in words
    sessions: int
    requests: int
    line: str  # all of the above in one line


class Completeness(_Model):
    status: Status
    banner: str | None  # what is missing, in words; None for a finished run that misses nothing
    planned: int  # after filter, reduction and context limit
    recorded: int  # requests with a record
    completed: int  # recorded without an error
    failed: int  # recorded with an error
    dropped: int  # turns that the context limit left out before the run; no part of planned
    missing: int  # planned, but without a record


class PageSize(_Model):
    tokens: int
    source: Literal["server", "option", "assumed"]


class Population(_Model):
    """Which requests the hit rates are about."""

    requests: int
    prompt_tokens: int
    basis: Literal["compared", "completed"]  # "completed" where the server reported no count at all
    text: str
    failed: int
    without_count: int  # completed, but no cached count reported
    faulty_count: int  # completed, but the count is outside 0..prompt tokens


class Rate(_Model):
    key: str
    title: str
    definition: str
    hit_tokens: int
    prompt_tokens: int
    requests: int
    rate: float


class MeanRate(_Model):
    key: str
    title: str
    definition: str
    requests: int
    mean: float


class ChainStep(_Model):
    key: str
    title: str
    definition: str
    tokens: int  # upper level - lower level, summed; = lost_tokens - gained_tokens
    lost_tokens: int  # sum over requests whose lower level is smaller
    gained_tokens: int  # sum over requests whose lower level is larger, as a positive number
    lost_requests: int
    gained_requests: int
    rate_difference: float  # tokens / prompt tokens of the population


class Chain(_Model):
    """ideal - sum(steps) = realized, in tokens, exactly (= ready where no count was reported)."""

    steps: list[ChainStep]
    ideal_tokens: int
    end_tokens: int
    end_key: Literal["realized", "ready"]
    gap_tokens: int
    prompt_tokens: int


class Drafting(_Model):
    """Speculative decoding."""

    algorithm: str
    mode: Literal["real", "synthetic", "unknown"]
    asked_length: float | None  # the synthetic acceptance length that was asked for
    drafts: int  # per verification step
    requests: int  # completed, with at least one step
    steps: int
    length: float | None
    by_position: list[float]  # fraction of steps, from the first draft on
    definition: str


class Tiers(_Model):
    requests: int  # compared requests with at least one tier reported
    device: int
    host: int
    storage: int
    unsplit: int  # realized tokens of compared requests that no tier accounts for


class Latency(_Model):
    metric: str
    title: str
    group: Literal["all", "hit >= 50 %", "hit < 50 %"]
    requests: int
    p50: float
    p90: float
    p95: float
    p99: float
    mean: float
    max: float


class Throughput(_Model):
    definition: str
    wall_s: float
    requests_per_s: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None


class GoodputGroup(_Model):
    group: Literal["hit >= 50 %", "hit < 50 %"]
    requests: int  # completed ones of the group
    within: int  # of these, within the objectives
    fraction: float


class Goodput(_Model):
    definition: str
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    requests: int  # completed within the objectives
    fraction: float  # of all recorded requests, failed ones included
    requests_per_s: float | None
    groups: list[GoodputGroup] = []  # what a hit is worth; a group without a request is left out


class SessionRow(_Model):
    session: str
    requests: int  # of the population
    failed: int
    prompt_tokens: int
    theoretical_tokens: int
    theoretical_rate: float
    realized_tokens: int | None
    realized_rate: float | None
    gap_tokens: int | None  # theoretical (page-aligned) - realized


class WorstRequest(_Model):
    session: str
    flow: str
    turn: int
    sent_s: float
    prompt_tokens: int
    theoretical_tokens: int
    ready_tokens: int
    realized_tokens: int
    gap_tokens: int
    ttft_s: float | None


class ErrorRow(_Model):
    kind: str
    requests: int
    example: str


class AuditLine(_Model):
    """One fast path: whether it was asked for, could run, and ran. ``agentserve.audit`` decides."""

    path: str
    configured: bool | None  # None: cannot be seen from outside
    setting: str
    eligible: bool | None  # None: depends on what the server does not report
    condition: str
    executed: float | None  # by a counter of the server, during this run; None: nothing counts it
    counter: str
    verdict: Literal["runs", "off", "not eligible", "not executed", "not proven"]


class Report(_Model):
    schema_version: int = SCHEMA_VERSION
    run: RunInfo
    data_set: DataSet
    completeness: Completeness
    page_size: PageSize
    population: Population
    rate_definition: str
    rates: list[Rate]
    mean_rates: list[MeanRate]
    chain: Chain
    attribution: AttributionReport | None = None  # None where the server reported no cached tokens
    tiers: Tiers | None
    latency: list[Latency]
    latency_definitions: dict[str, str]
    throughput: Throughput
    goodput: Goodput | None
    drafting: Drafting | None = None  # None where the server does not draft
    audit: list[AuditLine] = []  # empty where the server told no counters
    what_if: WhatIf | None = None  # None where it was not asked for, or there is nothing to simulate
    sessions: list[SessionRow]
    worst: list[WorstRequest]
    errors: list[ErrorRow]
    notes: list[str]

    def rate(self, key: str) -> Rate | None:
        """The rate with this key, or None where it could not be formed."""
        return next((r for r in self.rates if r.key == key), None)
