"""Writes down what an EAGLE3 draft proposes, as a plugin for SGLang's processes.

A random draft is next to never accepted, so its acceptance says little; what it proposes depends on all of its K and V.
``enable`` makes a server load this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RECORD_VARIABLE = "AGENTSERVE_TEST_PROPOSALS"


def recorded(original: Callable[..., Any], self: Any, batch: Any, **kwargs: Any) -> Any:
    """AROUND ``EagleDraftWorker.draft``."""
    from sglang.srt.runtime_context import get_parallel

    made = original(self, batch, **kwargs)
    if not batch.forward_mode.is_idle() and get_parallel().attn_tp_rank == 0:
        rows = made.draft_token.view(-1, self.speculative_num_draft_tokens)[:, 1:].tolist()
        with Path(os.environ[RECORD_VARIABLE]).open("a") as file:
            for row, req in zip(rows, batch.reqs, strict=True):
                file.write(json.dumps([req.rid, row]) + "\n")
    return made


def register() -> None:
    """The plugin; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(RECORD_VARIABLE):
        HookRegistry.register(
            "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft", recorded, HookType.AROUND
        )


def enable(folder: Path) -> Iterator[tuple[str, str]]:
    """Environment of a server that loads this module, found as a distribution of its own in ``folder``."""
    info = folder / "recorded_draft-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: recorded-draft\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nrecorded_draft = tests.recorded_draft:register\n")
    repository = Path(__file__).resolve().parent.parent
    paths = [str(folder), str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    yield "PYTHONPATH", os.pathsep.join(paths)
    yield RECORD_VARIABLE, str(folder / "proposals.jsonl")


def proposals(folder: Path, rid: str) -> list[list[int]]:
    """What was proposed for a request, step by step."""
    lines = (folder / "proposals.jsonl").read_text().splitlines()
    return [row for name, row in map(json.loads, lines) if name == rid]
