"""The simulator's answers in the report's JSON; see ``schema`` for what stays stable."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CurvePoint(_Model):
    """Simulated hit rates of one cache size."""

    capacity_tokens: int
    of_live: float  # capacity / mean of the live contexts
    rates: dict[str, float | None]  # by policy; None: left out


class Answer(_Model):
    """One change to this run's server, everything else as it was."""

    key: str
    question: str
    policy: str
    admission: str
    capacity_tokens: int
    host_tokens: int
    rate: float  # device and host hits together
    difference: float  # rate - the simulated rate of this run's own setting
    saved_tokens: int  # prompt tokens not computed, against the same
    more_bytes: int | None  # memory that it needs beyond this run's, device and host; None: bytes a token unknown
    worth_tokens: int | None  # memory that would bring as much under this run's policy; None: no size does, or unknown
    worth_bytes: int | None
    start_wait_s: float  # mean time that admission holds a new session
    rejected: int  # requests that do not fit into such a cache at all


class WhatIf(_Model):
    """Simulated on the run's own requests."""

    definition: str
    source: Literal["cache events", "prefix lengths"]
    source_text: str
    requests: int
    left_out_requests: int  # of the completed ones
    sessions: int  # at once
    policy: str  # taken as this run's own
    policy_text: str
    capacity_tokens: int | None
    bytes_per_token: float | None  # of all ranks together
    live_tokens: float  # mean of the live contexts
    theoretical_rate: float  # cache without bounds
    simulated_rate: float | None  # this run's own policy and capacity
    realized_rate: float | None  # what the server reported
    curve: list[CurvePoint]
    answers: list[Answer]
    left_out: list[str]  # simulations for which there was no time
    notes: list[str]
