"""A draft that knows the continuation and is wrong now and then, as a plugin for SGLang's processes.

A random draft is next to never accepted, so it would test no acceptance and no rollback. This one replaces the drafts
of a request whose prompt is in the script by what follows there, with some tokens exchanged; everything else, the
draft model's own forward passes included, stays as it is. ``enable`` makes a server load it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SCRIPT_VARIABLE = "AGENTSERVE_TEST_SCRIPT"
WRONG = 0.3  # probability that a draft is exchanged

_loaded: tuple[float, dict[str, list[int]]] = (0.0, {})


def key_of(prompt: Sequence[int]) -> str:
    return ",".join(map(str, prompt))


def drafts_after(continuation: Sequence[int], written: int, count: int) -> list[int]:
    """What is proposed after ``written`` tokens of the continuation; the same at every call."""
    rng = random.Random(f"{key_of(continuation)}/{written}")
    # Another token: the one before it, or 1 for 0.
    return [abs(token - (rng.random() < WRONG)) for token in continuation[written : written + count]]


def expected_steps(continuation: Sequence[int], wanted: int, count: int) -> list[int]:
    """Accepted drafts of each verification step of a request for ``wanted`` tokens, as SGLang must report them."""
    steps, written = [], 1  # the first token comes from the prefill
    while written < wanted:
        accepted = 0
        for draft, token in zip(drafts_after(continuation, written, count), continuation[written:], strict=False):
            if draft != token:
                break
            accepted += 1
        steps.append(accepted)
        written += accepted + 1
    return steps


def write_script(path: Path, continuations: dict[str, list[int]]) -> None:
    """Replace the script that a running server reads."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(continuations))
    fresh.rename(path)


def _script() -> dict[str, list[int]]:
    global _loaded
    path = Path(os.environ[SCRIPT_VARIABLE])
    if path.exists() and path.stat().st_mtime != _loaded[0]:
        _loaded = (path.stat().st_mtime, json.loads(path.read_text()))
    return _loaded[1]


def scripted(original: Callable[..., Any], self: Any, batch: Any, **kwargs: Any) -> Any:
    """AROUND ``EagleDraftWorker.draft``."""
    made = original(self, batch, **kwargs)
    if batch.forward_mode.is_idle():
        return made
    tokens = made.draft_token.view(-1, self.speculative_num_draft_tokens)
    script = _script()
    for row, req in zip(tokens, batch.reqs, strict=True):
        continuation = script.get(key_of(req.origin_input_ids))
        if continuation is not None:
            drafts = drafts_after(continuation, len(req.output_ids), len(row) - 1)
            row[1 : 1 + len(drafts)] = row.new_tensor(drafts)
    return made


def register() -> None:
    """The plugin; SGLang calls it in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(SCRIPT_VARIABLE):
        HookRegistry.register(
            "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft", scripted, HookType.AROUND
        )


def enable(folder: Path, script: Path) -> Iterator[tuple[str, str]]:
    """Environment of a server that loads this module, found as a distribution of its own in ``folder``."""
    info = folder / "scripted_draft-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-draft\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nscripted_draft = tests.scripted_draft:register\n")
    repository = Path(__file__).resolve().parent.parent
    paths = [str(folder), str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    yield "PYTHONPATH", os.pathsep.join(paths)
    yield SCRIPT_VARIABLE, str(script)
