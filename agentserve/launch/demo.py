"""Settings of the demo: a recipe that runs anywhere, and a trace small enough for two cores."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.launch.recipe import Override

GENERATED_TRACE = "generated:preset=tiny,sessions={sessions},seed=2"
# Four conversations of the generated trace that are alive at once take 3,700 tokens on average. With a quarter more
# there is something to explain; with ten times more every page stays and nothing is lost.
CAPACITY = 4_608
RECORDED_CAPACITY = 65_536

# Answers are short so that the demo is about prefixes: decoding is what a CPU is slow at.
MAX_OUTPUT = 16
# The tiny model's context is 32,768 tokens and real prompts have many times that: the blocks of a recorded trace
# are cut to this many tokens, which keeps what is shared with what.
TOKENS_PER_BLOCK = 2


class DemoServer(NamedTuple):
    """What the demo changes of the recipe ``tiny-cpu``.

    Attributes:
        checkpoint: a tiny M3.
        port: of the server.
        events_port: where it publishes cache events, which tell the report what became of lost tokens.
        capacity: tokens of KV cache.
        policy: an eviction policy of ours; None: SGLang's lru.
        admission: which sessions may start; needs a policy.
    """

    checkpoint: Path
    port: int
    events_port: int
    capacity: int
    policy: str | None = None
    admission: str | None = None

    @property
    def context_length(self) -> int | None:
        """No longer than what fits into the cache; None: the model's."""
        return self.capacity if self.capacity < TinyM3Shape().max_position else None

    def overrides(self) -> list[Override]:
        """Fields of the recipe."""
        fields = (
            Override("model", str(self.checkpoint), "--checkpoint"),
            Override("port", self.port, "demo"),
            Override("kv_events", f"tcp://127.0.0.1:{self.events_port}", "demo"),
            Override("kv.capacity_tokens", self.capacity, "--capacity"),
            Override("context_length", self.context_length, "--capacity"),
            Override("radix.policy", self.policy, "--policy"),
            Override("radix.admission", self.admission, "--admission"),
        )
        return [field for field in fields if field.value is not None]

    def arguments(self) -> list[str]:
        """The same as arguments of ``agentserve launch``."""
        given = ["tiny-cpu", "--model", str(self.checkpoint), "--port", str(self.port)]
        given += ["--set", f"kv.capacity_tokens={self.capacity}", "--kv-events", f"tcp://127.0.0.1:{self.events_port}"]
        given += [] if self.context_length is None else ["--set", f"context_length={self.context_length}"]
        given += [] if self.policy is None else ["--policy", self.policy]
        return given + ([] if self.admission is None else ["--admission", self.admission])


def replay_arguments(trace: Path | None, sessions: int, out: Path, url: str) -> list[str]:
    """Arguments of ``agentserve replay`` for a recorded trace, or for a generated one."""
    common = ["--out", str(out), "--url", url, "--concurrency", str(min(sessions, 4)), "--max-output", str(MAX_OUTPUT)]
    if trace is None:
        return [GENERATED_TRACE.format(sessions=sessions), *common, "--think", "capped:0.2"]
    reduction = ["--tokens-per-block", str(TOKENS_PER_BLOCK), "--max-turns", "20", "--sessions", str(sessions)]
    return [str(trace), *common, *reduction, "--think", "none"]


def free_run_directory(wanted: Path) -> Path:
    """``wanted``, or the first of ``wanted-2``, ``wanted-3``, ... that holds nothing yet."""
    names = itertools.chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not path.exists() or (path.is_dir() and not any(path.iterdir())))
