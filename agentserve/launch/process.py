"""A server as a child process that is waited for, and that leaves nothing behind.

SGLang is a tree of processes (HTTP server, one scheduler a rank, detokenizer). The tree is started in a
session of its own, so that a Ctrl-C in the terminal reaches the launcher only and the end is orderly. What
must be gone at the end is found three ways, since each alone misses some: children seen while the server lived
(their parent may be dead by now), children now, and members of the session.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import httpx
import psutil

from agentserve.launch.diagnose import diagnose
from agentserve.launch.plan import LaunchPlan

LOG_TAIL_LINES = 30
_POLL_S = 0.2
_LAST_GRACE_S = 1.0
_KILL_ROUNDS = 10
_HEALTH_TIMEOUT_S = 30.0  # /health of SGLang generates a token before it answers
PROBES = ("/health", "/health_generate")  # of SGLang
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded here: not between fork and exec

Progress = Callable[[float, str], None]  # seconds since the start, last line of the log


class ServerError(RuntimeError):
    """The server did not get ready. ``exit_code`` is its own, None where it had to be stopped."""

    def __init__(self, message: str, exit_code: int | None, log: Path) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.log = log


class ServerProcess:
    """The process of a plan, as a context manager: started on entry, gone with all descendants on exit.

    Enter it in the main thread: SIGTERM and SIGHUP then raise ``SystemExit`` inside the block, as Ctrl-C
    raises ``KeyboardInterrupt``, so that the exit runs; and the kernel kills the server when the thread that
    started it ends, which covers a launcher that gets SIGKILL.

    Args:
        plan: what to run.
        log: file for the server's output; its folder is made.
        stop_timeout_s: seconds the server gets to finish running requests before it is killed.
        probes: paths that answer 200, one after the other, once it is ready.
    """

    def __init__(
        self, plan: LaunchPlan, log: Path, *, stop_timeout_s: float = 15.0, probes: Sequence[str] = PROBES
    ) -> None:
        self.plan = plan
        self._probes = probes
        self.log = log
        self.stop_timeout_s = stop_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._seen: dict[psutil.Process, None] = {}  # descendants met so far, in order
        self._handlers: dict[signal.Signals, signal.Handlers | Callable[..., object] | int | None] = {}

    def __enter__(self) -> Self:
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            out = self.log.open("wb")
        except OSError as error:
            reason = error.strerror or error
            raise ServerError(
                f"the server's log {self.log} cannot be written ({reason}); name another place", None, self.log
            ) from None
        self.catch_signals()
        try:
            with out:
                self._process = subprocess.Popen(
                    self.plan.argv,
                    env=self.plan.environment(os.environ),
                    cwd=self.plan.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),
                )
        except BaseException:
            if self._process is not None:  # interrupted right after the start
                self.stop()
            self._restore_handlers()
            raise
        self._started = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        finally:
            self._restore_handlers()

    @property
    def pid(self) -> int:
        return self._running().pid

    def poll(self) -> int | None:
        """Exit code of the server, or None while it runs. Notes its descendants on the way."""
        process = self._running()
        if process.returncode is None:  # not reaped yet, so the pid is still its own
            self._seen = {known: None for known in self._seen if _alive(known)}
            with suppress(psutil.Error):
                self._seen |= dict.fromkeys(psutil.Process(process.pid).children(recursive=True))
        return process.poll()

    def wait_ready(
        self, timeout_s: float, progress: Progress | None = None, stop: threading.Event | None = None
    ) -> float:
        """Wait until the server answers its probes: of SGLang, /health, and that it has generated a token once.

        Args:
            timeout_s: seconds from the start after which to give up.
            progress: called a few times a second.
            stop: set by another thread to give up at once.

        Returns:
            Seconds from the start to readiness.

        Raises:
            ServerError: it exited, or the time is over. The message holds the end of its log and its path.
        """
        probes = iter(self._probes)
        probe = next(probes)
        with httpx.Client(base_url=self.plan.url, trust_env=False) as client:
            while True:
                elapsed = time.monotonic() - self._started
                exit_code = self.poll()
                if exit_code is not None:
                    raise ServerError(self._why(exit_code, elapsed), exit_code, self.log)
                if elapsed > timeout_s or (stop is not None and stop.is_set()):
                    raise ServerError(
                        f"the server is not ready after {elapsed:.0f} s; its last lines:\n{self.log_tail()}\n"
                        f"log: {self.log}",
                        None,
                        self.log,
                    )
                if _answers(client, probe, min(_HEALTH_TIMEOUT_S, max(1.0, timeout_s - elapsed))):
                    following = next(probes, None)
                    if following is None:
                        return time.monotonic() - self._started
                    probe = following
                    continue
                if progress is not None:
                    progress(elapsed, self.last_line())
                time.sleep(_POLL_S)

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        while (exit_code := self.poll()) is None:
            time.sleep(5 * _POLL_S)
        return exit_code

    def stop(self) -> int:
        """End the server and everything it started; its exit code. Harmless when it has ended already.

        The server is asked with SIGTERM, and killed after ``stop_timeout_s`` or at a second Ctrl-C. What is
        left of its tree after that is killed in any case.
        """
        process = self._running()
        with _counted_interrupts() as interrupts:
            if self.poll() is None:
                process.terminate()
                deadline = time.monotonic() + self.stop_timeout_s
                while self.poll() is None and time.monotonic() < deadline and not interrupts:
                    time.sleep(_POLL_S / 4)
                process.kill()
            exit_code = process.wait()
            # Helpers that end with their parent (multiprocessing's resource tracker) free shared memory.
            survivors = self._wait_gone()
            for _ in range(_KILL_ROUNDS):  # a process that is killed can just have forked: look again
                for survivor in survivors:
                    with suppress(psutil.Error):
                        survivor.kill()
                survivors = self._wait_gone()
                if not survivors:
                    break
            return exit_code

    def survivors(self) -> list[psutil.Process]:
        """Processes of the server's tree that still run, without the server itself."""
        process = self._running()
        found = dict(self._seen)
        if process.returncode is None:
            with suppress(psutil.Error):
                found |= dict.fromkeys(psutil.Process(process.pid).children(recursive=True))
        for other in psutil.process_iter():
            with suppress(OSError):
                if other.pid != process.pid and os.getsid(other.pid) == process.pid:
                    found[other] = None
        return [other for other in found if _alive(other)]

    def _wait_gone(self) -> list[psutil.Process]:
        """Wait a moment for the tree to end; who has not. Unlike ``psutil.wait_procs`` a zombie counts as gone:
        an orphan's new parent may never reap it."""
        deadline = time.monotonic() + _LAST_GRACE_S
        while (survivors := self.survivors()) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 4)
        return survivors

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(_tail(self.log, lines))

    def last_line(self) -> str:
        """The log's last line that says something: Python's warnings quote source lines, indented."""
        return next((line for line in reversed(_tail(self.log, 10)) if line[:1].strip()), "")

    def _why(self, exit_code: int, elapsed: float) -> str:
        how = f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        tail = self.log_tail()
        cause = diagnose(tail, exit_code)
        lines = [
            f"the server ended after {elapsed:.0f} s with {how}; its last lines:",
            tail,
            f"log: {self.log}",
        ]
        return "\n".join(lines + ([f"likely cause: {cause}"] if cause else []))

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("ServerProcess is used before it was entered")
        return self._process

    def catch_signals(self) -> None:
        """Have SIGTERM and SIGHUP end the block; again after code that has set handlers of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP on purpose.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers.setdefault(number, signal.signal(number, _exit_by_signal))

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()


def _exit_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Collect signals instead of letting them break off the clean-up; any received one means hurry."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """What the child does before exec: have the kernel kill it when its parent dies (Linux)."""
    if _LIBC is None:
        return None
    prctl = _LIBC.prctl

    def set_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)

    return set_signal


def _answers(client: httpx.Client, path: str, timeout_s: float) -> bool:
    try:
        return client.get(path, timeout=timeout_s).status_code == 200
    except httpx.HTTPError:
        return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _tail(path: Path, lines: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64 * 1024))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return list(deque(text.replace("\r", "\n").splitlines(), maxlen=lines))
