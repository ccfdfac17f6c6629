"""Settings of the demo: a recipe that runs anywhere, and a trace small enough for two cores."""

from __future__ import annotations

import itertools
from pathlib import Path

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.launch.recipe import Override

GENERATED_TRACE = "generated:preset=tiny,sessions={sessions},seed=2"
# Four conversations of the generated trace that are alive at once take 3,700 tokens on average. With a quarter more
# there is something to explain; with ten times more every page stays and nothing is lost.
CAPACITY = 4_608

# Answers are short so that the demo is about prefixes: decoding is what a CPU is slow at.
MAX_OUTPUT = 16
# The tiny model's context is 32,768 tokens and real prompts have many times that: the blocks of a recorded trace
# are cut to this many tokens, which keeps what is shared with what.
TOKENS_PER_BLOCK = 2


def demo_overrides(
    checkpoint: Path, port: int, events_port: int, capacity: int | None, policy: str | None, admission: str | None
) -> list[Override]:
    """What the demo changes of the recipe ``tiny-cpu``.

    Args:
        checkpoint: a tiny M3.
        port: of the server.
        events_port: where it publishes cache events, which tell the report what became of lost tokens.
        capacity: tokens of KV cache; None: the recipe's.
        policy: an eviction policy of ours; None: SGLang's lru.
        admission: which sessions may start; needs a policy.
    """
    # No context is longer than what fits into the cache.
    context = capacity if capacity is not None and capacity < TinyM3Shape().max_position else None
    fields = (
        Override("model", str(checkpoint), "--checkpoint"),
        Override("port", port, "demo"),
        Override("kv_events", f"tcp://127.0.0.1:{events_port}", "demo"),
        Override("kv.capacity_tokens", capacity, "--capacity"),
        Override("context_length", context, "--capacity"),
        Override("radix.policy", policy, "--policy"),
        Override("radix.admission", admission, "--admission"),
    )
    return [field for field in fields if field.value is not None]


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
