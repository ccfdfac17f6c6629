"""Keeping a daemon alive: restarts, freezes, failures and the end, with a small program in LMCache's place."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from agentserve.launch.daemon import Daemon, offload_daemons
from agentserve.launch.host import free_port
from agentserve.launch.offload import Offload
from agentserve.launch.plan import LaunchPlan
from agentserve.launch.process import ServerError
from agentserve.launch.recipe import Recipe

PROGRAM = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthcheck" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def plan_of(*argv: str, port: int = 1) -> LaunchPlan:
    return LaunchPlan(argv, {}, (), Path.cwd(), f"http://127.0.0.1:{port}")


def healthy(tmp_path: Path, reports: list[str], frozen_after_s: float = 30.0) -> Daemon:
    port = free_port()
    plan = plan_of(sys.executable, "-c", PROGRAM, str(port), port=port)
    return Daemon(plan, tmp_path / "daemon.log", report=reports.append, frozen_after_s=frozen_after_s)


def wait_for_start(daemon: Daemon, number: int) -> None:
    deadline = time.monotonic() + 180
    while daemon.starts < number or daemon.pid is None:
        assert time.monotonic() < deadline, f"start {number} never came"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_killed_daemon_is_started_again_and_the_last_one_ends_with_the_block(tmp_path: Path) -> None:
    reports: list[str] = []
    with healthy(tmp_path, reports) as daemon:
        first = daemon.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_for_start(daemon, 2)
        second = daemon.pid
        assert second not in (None, first)
    assert second is not None
    assert gone(first)
    assert gone(second)
    assert "ended with exit code -9; starting it again in 1 s" in reports[0]
    assert {path.name for path in tmp_path.iterdir()} == {"daemon.log", "daemon-2.log"}


def test_a_frozen_daemon_is_killed_and_started_again(tmp_path: Path) -> None:
    reports: list[str] = []
    with healthy(tmp_path, reports, frozen_after_s=1.0) as daemon:
        first = daemon.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        wait_for_start(daemon, 2)
        assert gone(first)
    assert "did not answer for 1 s and was killed" in reports[0]


def test_a_daemon_that_cannot_start_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    plan = plan_of(sys.executable, "-c", "raise SystemExit('no such tier')")
    daemon = Daemon(plan, tmp_path / "daemon.log")
    with pytest.raises(ServerError, match="no such tier"), daemon:
        pass
    assert daemon.starts == 1


def test_segments_of_a_killed_server_go_when_its_daemon_ends(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    segment = Path("/dev/shm") / f"lmcache_kv_{child}_0"
    with healthy(tmp_path, []):
        segment.write_bytes(b"left behind")
    assert not segment.exists()
    running = Recipe(model="m3", device="cuda", offload=Offload(backend="lmcache", address="127.0.0.1:7000"))
    with offload_daemons(running, tmp_path / "lmcache.log") as daemons:
        segment.write_bytes(b"left behind")
        assert daemons == ()
    assert not segment.exists()
