"""The tiny M3 as a running server in one call, for tests and benchmarks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentserve.launch.daemon import offload_daemons
from agentserve.launch.host import free_port
from agentserve.launch.plan import make_plan
from agentserve.launch.preflight import preflight
from agentserve.launch.process import ServerProcess
from agentserve.launch.recipe import Override, find_recipe, load_recipe

READY_TIMEOUT_S = 600.0


@contextmanager
def tiny_server(
    overrides: Mapping[str, Any] | None = None,
    *,
    checkpoint: Path | None = None,
    log: Path | None = None,
    wait: bool = True,
) -> Iterator[ServerProcess]:
    """Start recipe ``tiny-cpu`` on a free port, stop it on exit.

    Args:
        overrides: fields of the recipe, dotted, as ``{"kv.capacity_tokens": 131072}``.
        checkpoint: the tiny M3; None writes one (seed 0) to a temporary folder.
        log: the server's log; None keeps it in that folder, and it goes with it.
        wait: until it generates; without, the caller calls ``wait_ready``, and can start another one meanwhile.

    Raises:
        RuntimeError: a check before the start failed; the message lists what and how to mend it.
        ServerError: the server did not get ready.
    """
    with tempfile.TemporaryDirectory(prefix="agentserve-") as folder:
        if checkpoint is None:
            from agentserve.checkpoint.tiny import write_tiny_checkpoint

            checkpoint = write_tiny_checkpoint(Path(folder) / "tiny-m3")
        settings = {"model": str(checkpoint), "port": free_port(), **(overrides or {})}
        recipe = load_recipe(find_recipe("tiny-cpu"), [Override(k, v, "tiny_server") for k, v in settings.items()])
        checked = preflight(recipe)
        if not checked.ok:
            raise RuntimeError("; ".join(f"{f.what} ({f.fix})" for f in checked.findings if f.level == "error"))
        plan = make_plan(recipe, checked.facts, model=recipe.model, cwd=Path(folder), draft=checked.draft)
        log = log or Path(folder) / "server.log"
        with offload_daemons(recipe, log.with_name("lmcache.log")), ServerProcess(plan, log) as server:
            if wait:
                server.wait_ready(READY_TIMEOUT_S)
            yield server
