"""The result of a comparison: the JSON of ``agentserve compare``, and the input of the terminal.

Stable: a field keeps its name and meaning within one ``schema_version``. Rates are fractions, times seconds.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class CompareError(ValueError):
    """Runs that must not be compared. The message says which, and why."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Doubt(_Model):
    """A difference between runs that limits what a comparison means."""

    level: Literal["refuse", "warn"]
    what: str  # the setting
    values: list[str]  # one a run
    text: str  # why it matters


class RunSide(_Model):
    """One run by itself, over the paired requests only where nothing else is said."""

    name: str
    run_id: str
    recorded: int  # all of the run
    failed: int  # all of the run
    paired: int
    prompt_tokens: int
    ideal_rate: float
    realized_rate: float
    gap_tokens: int
    causes: dict[str, int]  # lost tokens by cause; they sum to the gap
    evidence: Literal["events", "none"]
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    e2e_p50_s: float | None
    tpot_p50_s: float | None
    output_tokens_per_s: float | None  # all of the run, think time included


class Difference(_Model):
    """Another run less the first, over the same requests."""

    key: str
    title: str
    definition: str
    unit: Literal["fraction", "seconds", "tokens"]
    first: float
    other: float
    difference: float
    low: float | None  # bounds of the interval; None where there are too few sessions to form one
    high: float | None
    requests: int
    sessions: int


class Pairing(_Model):
    """One run against the first."""

    name: str
    requests: int  # in both runs, completed, with a cached-token count
    only_first: int  # completed in the first run only
    only_other: int
    same_answers: int  # of ``answers``
    answers: int  # paired requests whose answers both runs recorded
    same_lengths: bool  # prompts have the same lengths in both runs
    differences: list[Difference]


class Comparison(_Model):
    schema_version: int = SCHEMA_VERSION
    runs: list[RunSide]
    doubts: list[Doubt]
    server_differences: dict[str, list[str]]  # server's own arguments that differ: one value a run
    pairings: list[Pairing]
    interval: str  # how the intervals were formed
