"""LMCache's daemon beside a server: started, watched, started again, and gone at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from agentserve.launch.plan import LaunchPlan
from agentserve.launch.process import ServerError, ServerProcess
from agentserve.launch.recipe import Recipe
from offload.daemon import DaemonSpec, daemon_command
from offload.segments import clear_stale_segments

READY_TIMEOUT_S = 180.0
_POLL_S = 0.5
_HEALTH_S = 2.0
_FIRST_BACK_OFF_S = 1.0
_LAST_BACK_OFF_S = 30.0
_STEADY_S = 60.0  # having run for this long, the next end counts as the first again
_STOP_S = 5.0

Report = Callable[[str], None]


def daemon_plan(spec: DaemonSpec, cwd: Path) -> LaunchPlan:
    """The process of a daemon. Raises OffloadError."""
    return LaunchPlan(
        argv=tuple(daemon_command(spec)),
        env={
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_LOG_LEVEL": "WARNING",
            "OMP_NUM_THREADS": "1",
        },
        unset=("LMCACHE_CONFIG_FILE", "SGLANG_PLATFORM"),
        cwd=cwd,
        url=f"http://127.0.0.1:{spec.http_port}",
    )


@contextmanager
def offload_daemons(recipe: Recipe, log: Path, *, report: Report = lambda what: None) -> Iterator[tuple[Daemon, ...]]:
    """The daemons that a recipe asks for, healthy, for the length of the block; none where it asks for none.

    Each is watched and started again on its own. Where ranks have one each, the logs end in ``-rank0`` and so on.

    Raises:
        OffloadError: LMCache is not installed.
        ServerError: a daemon does not get healthy.
    """
    specs = recipe.offload.specs(recipe.tp) if recipe.offload.starts_daemon else []
    logs = [log] if len(specs) == 1 else [log.with_stem(f"{log.stem}-rank{rank}") for rank in range(len(specs))]
    daemons = tuple(
        Daemon(daemon_plan(spec, Path.cwd()), file, report=report, name=f"LMCache daemon {spec.host}:{spec.port}")
        for spec, file in zip(specs, logs, strict=True)
    )
    with ExitStack() as stack:
        if recipe.offload.backend is not None:
            stack.callback(clear_stale_segments)  # of a server that was killed, also where the daemon is another's
        # All at once: each takes seconds to import what it needs.
        for daemon in daemons:
            stack.callback(daemon.stop)
            daemon.start()
        for daemon in daemons:
            daemon.wait_healthy()
        yield daemons


class Daemon:
    """One daemon, kept alive by a thread: entered when it is healthy, gone with its segments on exit.

    Args:
        plan: from ``daemon_plan``.
        log: file of its output; later starts write ``NAME-2.log``, ``NAME-3.log`` and so on.
        report: told of ends and restarts, one sentence each.
        name: what these sentences call it.
        frozen_after_s: a daemon that does not answer for this long is killed and started again.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        log: Path,
        *,
        report: Report = lambda what: None,
        name: str = "LMCache daemon",
        frozen_after_s: float = 30.0,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.plan = plan
        self.starts = 0
        self.pid: int | None = None
        self._log = log
        self._report = report
        self._name = name
        self._frozen_after_s = frozen_after_s
        self._ready_timeout_s = ready_timeout_s
        self._stopping = threading.Event()
        self._settled = threading.Event()  # the first start has succeeded or failed
        self._failure: ServerError | None = None
        # The kernel ends a child with the thread that started it: one thread starts them all.
        self._thread = threading.Thread(target=self._keep_alive, name="agentserve-daemon", daemon=True)

    def __enter__(self) -> Self:
        """Raises ServerError, with the end of its log, when it does not get healthy."""
        self.start()
        self.wait_healthy()
        return self

    def start(self) -> None:
        """Begin to start it. From here on ``stop`` has to be called."""
        clear_stale_segments()
        self._thread.start()

    def wait_healthy(self) -> None:
        """Raises ServerError, with the end of its log, when it does not get healthy; it is stopped then."""
        try:
            self._settled.wait()
        except BaseException:
            self.stop()
            raise
        if self._failure is not None:
            self.stop()
            raise self._failure

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it; harmless when it has ended or never began. Segments of a server that was killed go with it."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        clear_stale_segments()

    def _keep_alive(self) -> None:
        back_off = _FIRST_BACK_OFF_S
        while not self._stopping.is_set():
            started = time.monotonic()
            why = self._run_once()
            self.pid = None
            if self._stopping.is_set() or self._failure is not None:
                return
            back_off = _FIRST_BACK_OFF_S if time.monotonic() - started > _STEADY_S else back_off
            self._report(f"the {self._name} {why}; starting it again in {back_off:.0f} s")
            self._stopping.wait(back_off)
            back_off = min(2 * back_off, _LAST_BACK_OFF_S)

    def _run_once(self) -> str:
        """From start to end; why it ended."""
        self.starts += 1
        log = self._log if self.starts == 1 else self._log.with_stem(f"{self._log.stem}-{self.starts}")
        with ServerProcess(self.plan, log, stop_timeout_s=_STOP_S, probes=("/healthcheck",)) as process:
            self.pid = process.pid
            try:
                process.wait_ready(self._ready_timeout_s, stop=self._stopping)
            except ServerError as error:
                if not self._settled.is_set():
                    self._failure = error
                    self._settled.set()
                return "did not get healthy"
            if self.starts > 1:
                self._report(f"the {self._name} is back (start {self.starts})")
            self._settled.set()
            return self._watch(process)

    def _watch(self, process: ServerProcess) -> str:
        answered = asked = time.monotonic()
        with httpx.Client(base_url=self.plan.url, trust_env=False, timeout=2.0) as client:
            while not self._stopping.wait(_POLL_S):
                exit_code = process.poll()
                if exit_code is not None:
                    return f"ended with exit code {exit_code}"
                if time.monotonic() - asked < _HEALTH_S:
                    continue
                asked = time.monotonic()
                try:
                    client.get("/healthcheck")
                    answered = time.monotonic()
                except httpx.HTTPError:
                    if time.monotonic() - answered > self._frozen_after_s:
                        return f"did not answer for {self._frozen_after_s:.0f} s and was killed"
        return "was stopped"
