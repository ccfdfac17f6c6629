"""Everything a replay can be told. ``run.json`` keeps it, so that ``--resume`` needs nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from traces.replay.schedule import Think
from traces.replay.select import Limits

_Count = Annotated[int, Field(ge=1)]


class ReplayConfig(BaseModel):
    """What to replay, where to and how. Lengths in tokens, times in seconds; None means no limit or unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: str  # file, directory, archive or generator, as `traces.open_trace` takes it
    out: Path  # run directory
    url: str = "http://127.0.0.1:30000"
    client: Literal["sglang", "openai"] = "sglang"
    model: str | None = None  # served name, OpenAI client only; None: the first one listed
    trace_format: str | None = None
    skip_bad: bool = False
    sessions: _Count | None = None
    concurrency: _Count = 4  # sessions active at once
    in_flight: _Count | None = None  # requests sent and not yet answered at once; None: one for each active flow
    think: str = "recorded"  # recorded | none | scaled:FACTOR | capped:SECONDS | scaled:FACTOR,capped:SECONDS
    history: Literal["recorded", "own"] = "recorded"
    sharing: Literal["session", "tools+system"] = "session"
    tokens_per_block: _Count | None = None
    max_turns: _Count | None = None
    max_output: _Count | None = None
    max_context: _Count | None = None  # None: what the server takes
    limit_requests: _Count | None = None
    over_limit: Literal["end-flow", "drop-turn", "fail"] = "end-flow"
    seed: int = 0
    shuffle: bool = False
    vocab: tuple[int, int] | None = None  # half-open range of token ids; None: from the server's checkpoint
    flush_cache: bool | None = None  # None: yes where the protocol can (SGLang)
    ignore_eos: bool = True  # OpenAI client only; the other one always does
    events: str = "auto"  # cache events: auto (where the server publishes them), none, or a ZMQ address
    metrics_every_s: float = Field(default=2.0, ge=0)  # seconds between samples of the server's counters; 0: none
    request_timeout_s: float = Field(default=600.0, gt=0)

    @field_validator("think")
    @classmethod
    def _readable_think(cls, text: str) -> str:
        Think.parse(text)
        return text

    @field_validator("vocab")
    @classmethod
    def _ordered_vocab(cls, vocab: tuple[int, int] | None) -> tuple[int, int] | None:
        if vocab is not None and not 0 <= vocab[0] < vocab[1] - 1:
            raise ValueError(f"vocab must be LO:HI with at least two token ids from 0 on, got {vocab[0]}:{vocab[1]}")
        return vocab

    @model_validator(mode="after")
    def _vocab_for_token_ids(self) -> ReplayConfig:
        if self.client == "openai" and self.vocab is not None:
            raise ValueError("vocab is for the sglang client; chat completions are sent as words, leave it out")
        return self

    @property
    def thinking(self) -> Think:
        return Think.parse(self.think)

    def limits(self, max_context: int | None) -> Limits:
        """What is taken of the trace. ``max_context`` takes the place of the setting, which may be above a server's."""
        return Limits(
            sessions=self.sessions,
            requests=self.limit_requests,
            max_turns=self.max_turns,
            max_output=self.max_output,
            tokens_per_block=self.tokens_per_block,
            max_context=max_context,
            over_limit=self.over_limit,
            shuffle=self.shuffle,
            seed=self.seed,
        )
