"""Settings of the demo: a recipe that runs anywhere, and a trace small enough for two cores."""

from __future__ import annotations

import itertools
from pathlib import Path

from agentserve.launch.recipe import Override

GENERATED_TRACE = "generated:preset=tiny,sessions={sessions},seed=2"

# Answers are short so that the demo is about prefixes: decoding is what a CPU is slow at.
MAX_OUTPUT = 16
# The tiny model's context is 32,768 tokens and real prompts have many times that: the blocks of a recorded trace
# are cut to this many tokens, which keeps what is shared with what.
TOKENS_PER_BLOCK = 2


def demo_overrides(port: int, checkpoint: Path) -> list[Override]:
    """What the demo changes of the recipe ``tiny-cpu``."""
    return [Override("port", port, "demo"), Override("model", str(checkpoint), "demo")]


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
