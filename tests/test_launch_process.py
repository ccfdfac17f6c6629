"""Server processes with real children: late health, early death, deaf servers, orphans, dying launchers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from agentserve.launch.diagnose import diagnose
from agentserve.launch.host import free_port
from agentserve.launch.plan import LaunchPlan
from agentserve.launch.process import ServerError, ServerProcess

pytestmark = pytest.mark.timeout(300)

ENGINE = textwrap.dedent(
    """
    import http.server, os, signal, subprocess, sys, time

    port, mode, pids = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]

    def note(pid):
        with open(pids, "a") as file:
            file.write(f"{pid}\\n")

    def spawn(**kwargs):
        note(subprocess.Popen(SLEEP, **kwargs).pid)

    note(os.getpid())
    print("engine starts", flush=True)
    if mode == "dies":
        print("ModuleNotFoundError: No module named 'flux'", flush=True)
        sys.exit(3)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # a grandchild that ignores SIGTERM too
        note(subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(300)"]).pid)
    if mode == "family":
        spawn()
        spawn(start_new_session=True)
        # re-parented: its parent is gone before the server is ready
        middle = subprocess.Popen([sys.executable, "-c",
            "import subprocess, sys; p = subprocess.Popen(sys.argv[2:], stdout=subprocess.DEVNULL);"
            "open(sys.argv[1], 'a').write(f'{p.pid}\\\\n')", pids, *SLEEP])
        middle.wait()
    ready_at = time.monotonic() + (1.0 if mode == "late" else 0.0)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            ok = time.monotonic() >= ready_at and self.path in ("/health", "/health_generate")
            if mode == "never":
                ok = False
            self.send_response(200 if ok else 503)
            self.end_headers()
            if mode == "serves-then-dies" and self.path == "/health_generate":
                self.wfile.flush()
                print("torch: DefaultCPUAllocator: can't allocate memory", flush=True)
                os._exit(7)
        def log_message(self, *args):
            print(self.path, flush=True)

    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
    """
)


class Engine:
    """A stand-in for SGLang that writes down the pids it starts."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "engine.py"
        self.script.write_text(ENGINE)
        self.pid_file = folder / "pids"
        self.log = folder / "logs" / "engine.log"
        self.cwd = folder

    def plan(self, mode: str) -> LaunchPlan:
        port = free_port()
        argv = (sys.executable, str(self.script), str(port), mode, str(self.pid_file))
        return LaunchPlan(argv, {}, (), self.cwd, f"http://127.0.0.1:{port}")

    def pids(self) -> list[int]:
        return [int(line) for line in self.pid_file.read_text().split()] if self.pid_file.exists() else []

    def alive(self) -> list[int]:
        return [pid for pid in self.pids() if running(pid)]


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_late_health_shows_progress_then_ready(engine: Engine) -> None:
    seen: list[tuple[float, str]] = []
    with ServerProcess(engine.plan("late"), engine.log) as server:
        seconds = server.wait_ready(120, lambda elapsed, line: seen.append((elapsed, line)))
        assert seconds >= 1.0
        assert engine.alive() == [server.pid]
        tail = server.log_tail()
    assert seen
    assert seen == sorted(seen, key=lambda item: item[0])
    assert any("engine starts" in line or "/health" in line for _, line in seen)
    assert tail.splitlines()[-1] == "/health_generate"  # asked once, after /health
    assert tail.count("/health_generate") == 1
    assert engine.alive() == []


def test_early_death_reports_log_path_and_cause(engine: Engine) -> None:
    with pytest.raises(ServerError) as caught, ServerProcess(engine.plan("dies"), engine.log) as server:
        server.wait_ready(120)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    assert "exit code 3" in message
    assert "engine starts" in message
    assert str(engine.log) in message
    assert "package 'flux' is missing" in message


def test_death_while_serving_ends_wait_with_its_code(engine: Engine) -> None:
    with ServerProcess(engine.plan("serves-then-dies"), engine.log) as server:
        server.wait_ready(120)
        assert server.wait() == 7
        assert "can't allocate memory" in server.log_tail()


def test_timeout_stops_a_server_that_never_gets_healthy(engine: Engine) -> None:
    with ServerProcess(engine.plan("never"), engine.log) as server:
        assert eventually(lambda: engine.alive() == [server.pid])
        with pytest.raises(ServerError, match=r"not ready after \d+ s") as caught:
            server.wait_ready(1.0)
        assert caught.value.exit_code is None
    assert engine.alive() == []


def test_whole_family_is_gone_also_orphans_and_other_sessions(engine: Engine) -> None:
    with ServerProcess(engine.plan("family"), engine.log) as server:
        server.wait_ready(120)
        assert len(engine.alive()) == 4
    assert engine.alive() == []


def test_family_is_gone_after_the_server_was_killed(engine: Engine) -> None:
    with ServerProcess(engine.plan("family"), engine.log) as server:
        server.wait_ready(120)
        os.kill(server.pid, signal.SIGKILL)
        assert server.wait() == -signal.SIGKILL
        assert len(engine.alive()) == 3  # what a plain wait would leave behind
    assert engine.alive() == []


def test_server_deaf_to_sigterm_is_killed(engine: Engine) -> None:
    server = ServerProcess(engine.plan("deaf"), engine.log, stop_timeout_s=0.5)
    with server:
        server.wait_ready(120)
        assert len(engine.alive()) == 2
        began = time.monotonic()
    assert time.monotonic() - began < 40
    assert server.stop() == -signal.SIGKILL  # again: harmless
    assert engine.alive() == []


def test_missing_program_raises_and_restores_handlers(engine: Engine) -> None:
    before = signal.getsignal(signal.SIGTERM)
    plan = LaunchPlan((str(engine.cwd / "nothing"),), {}, (), engine.cwd, "http://127.0.0.1:9")
    with pytest.raises(FileNotFoundError), ServerProcess(plan, engine.log):
        raise AssertionError("entered")
    assert signal.getsignal(signal.SIGTERM) is before


LAUNCHER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from agentserve.launch.plan import LaunchPlan
    from agentserve.launch.process import ServerProcess

    url, log, argv = sys.argv[1], Path(sys.argv[2]), tuple(sys.argv[3:])
    try:
        with ServerProcess(LaunchPlan(argv, {}, (), Path.cwd(), url), log, stop_timeout_s=2.0) as server:
            server.wait_ready(120)
            print("ready", flush=True)
            server.wait()
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


def start_launcher(engine: Engine, mode: str) -> subprocess.Popen[str]:
    plan = engine.plan(mode)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, plan.url, str(engine.log), *plan.argv],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    return launcher


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda v: str(v),
)
def test_signalled_launcher_takes_everything_along(engine: Engine, number: int, code: int) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup, which their processes inherit")
    launcher = start_launcher(engine, "family")
    assert len(engine.alive()) == 4
    launcher.send_signal(number)
    assert launcher.wait(90) == code
    assert engine.alive() == []


def test_second_interrupt_kills_at_once(engine: Engine) -> None:
    launcher = start_launcher(engine, "deaf")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    launcher.wait(90)
    assert engine.alive() == []


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux only")
def test_killed_launcher_takes_the_server_along(engine: Engine) -> None:
    launcher = start_launcher(engine, "plain")
    (server,) = engine.alive()
    launcher.kill()
    launcher.wait(90)
    assert eventually(lambda: not running(server))


@pytest.mark.parametrize(
    ("log", "code", "expected"),
    [
        ("OSError: [Errno 98] Address already in use", 1, "pass --port"),
        ("ModuleNotFoundError: No module named 'triton.language'", 1, "'triton.language' is missing"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", 1, "out of GPU memory"),
        ("launch_server.py: error: unrecognized arguments: --foo", 2, "unrecognized arguments: --foo"),
        ("[Errno 24] Too many open files", 1, "ulimit"),
        ("nothing of note", -9, "SIGKILL"),
    ],
)
def test_common_causes(log: str, code: int, expected: str) -> None:
    cause = diagnose(log, code)
    assert cause is not None
    assert expected in cause


def test_unknown_cause_is_not_invented() -> None:
    assert diagnose("all is well", 1) is None
