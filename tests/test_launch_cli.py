"""``agentserve launch`` as a user runs it: messages, exit codes, and a dry run that starts nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml
from click.testing import CliRunner

from agentserve.cli.launch import command, launch_arguments
from agentserve.launch.demo import demo_overrides, free_run_directory, replay_arguments
from agentserve.launch.host import free_port
from agentserve.launch.recipe import Recipe, RecipeError, find_recipe, load_recipe
from tests.test_launch_preflight import write_checkpoint

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def recipe(tmp_path: Path) -> Iterator[Path]:
    fields = {
        "model": str(write_checkpoint(tmp_path / "m3")),
        "served_name": "m3",
        "device": "cpu",
        "dtype": "float32",
        "kv": {"capacity_tokens": 4096},
        "port": free_port(),
    }
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(fields))
    before = servers()  # other tests share a server for the whole session
    yield path
    assert servers() <= before


def servers() -> set[int]:
    """Process ids of SGLang below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True) if "sglang" in " ".join(child.cmdline())}


def test_dry_run_prints_command_and_bytes_per_token_only(recipe: Path) -> None:
    result = CliRunner().invoke(command, [str(recipe), "--dry-run", "--kv-tokens", "8192"])
    assert result.exit_code == 0, result.output
    line = result.stdout.splitlines()[0]
    assert "SGLANG_PLATFORM=agentserve_cpu" in line
    assert f"{sys.executable} -m sglang.launch_server" in line
    assert "--max-total-tokens 8192" in line
    assert "--page-size 128" in line
    rows = {row.split("│")[1].strip(): row for row in result.stdout.splitlines() if row.startswith("│")}
    assert "768" in rows["K"]
    assert "256" in rows["index-K"]
    assert "1,792" in rows["all"]
    assert not (recipe.parent / "runs").exists()


def test_errors_of_recipe_exit_with_2(recipe: Path) -> None:
    result = CliRunner().invoke(command, [str(recipe), "--set", "kv.capcity=3"])
    assert result.exit_code == 2
    assert "did you mean 'capacity_tokens'?" in result.stderr


def test_preflight_errors_exit_with_2_all_shown_nothing_started(recipe: Path, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    arguments = [str(recipe), "--model", str(tmp_path / "none"), "--page-size", "100", "--set", "prefill_chunk=150"]
    result = CliRunner().invoke(command, [*arguments, "--log", str(log)])
    assert result.exit_code == 2
    assert "none' does not exist" in result.stderr
    assert "prefill_chunk 150 is not a multiple" in result.stderr
    assert not log.exists()


def test_missing_checkpoint_is_named_also_when_the_page_size_hangs_on_it(recipe: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(recipe), "--model", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "agentserve checkpoint tiny" in result.stderr


FAKE_SGLANG = """
import http.server, sys
argv = sys.argv
port = int(argv[argv.index("--port") + 1])
if "--watchdog-timeout" in argv:
    print("error: argument --watchdog-timeout: invalid", flush=True)
    sys.exit(2)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(recipe: Path, tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The real command in a process of its own, with a stand-in for the module ``sglang.launch_server``."""
    package = tmp_path / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(FAKE_SGLANG)
    return subprocess.Popen(
        [sys.executable, "-c", "from agentserve.cli import main; main()", "launch", str(recipe), *options],
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


# Preflight asks for the installed distribution. Importing it here would cost seconds.
needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason="sglang is not installed")


@needs_sglang
def test_ready_line_then_clean_end_at_interrupt(recipe: Path, tmp_path: Path) -> None:
    launcher = start(recipe, tmp_path)
    assert launcher.stdout is not None
    ready, example = launcher.stdout.readline(), launcher.stdout.readline()
    port = yaml.safe_load(recipe.read_text())["port"]
    assert ready.startswith("ready after")
    assert f"http://127.0.0.1:{port}/v1" in ready
    assert example.startswith("try: curl http://127.0.0.1")
    server = psutil.Process(launcher.pid).children()
    assert len(server) == 1
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 0, errors
    assert not server[0].is_running()
    assert list((tmp_path / "runs" / "launch").glob("r-*.log"))


@needs_sglang
def test_server_refusing_an_argument_gives_its_exit_code_and_cause(recipe: Path, tmp_path: Path) -> None:
    launcher = start(recipe, tmp_path, "--set", "extra_args=[--watchdog-timeout, x]", "--log", "s.log")
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 2
    assert "SGLang refused an argument" in errors
    assert "s.log" in errors


@needs_sglang
def test_server_dying_later_gives_its_exit_code(recipe: Path, tmp_path: Path) -> None:
    launcher = start(recipe, tmp_path)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    (server,) = psutil.Process(launcher.pid).children()
    server.kill()
    _, errors = launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert "ended by itself" in errors


def test_demo_never_writes_into_an_older_run(tmp_path: Path) -> None:
    wanted = tmp_path / "demo"
    assert free_run_directory(wanted) == wanted
    wanted.mkdir()
    assert free_run_directory(wanted) == wanted
    (wanted / "run.json").write_text("{}")
    assert free_run_directory(wanted) == tmp_path / "demo-2"


def test_demo_replays_at_most_as_many_sessions_at_once_as_there_are() -> None:
    arguments = replay_arguments(None, 2, Path("out"), "http://h:1")
    assert arguments[0] == "generated:preset=tiny,sessions=2,seed=2"
    assert arguments[arguments.index("--concurrency") + 1] == "2"
    recorded = replay_arguments(Path("t.json"), 9, Path("out"), "http://h:1")
    assert recorded[0] == "t.json"
    assert recorded[recorded.index("--sessions") + 1] == "9"


@pytest.mark.parametrize("capacity", [4_608, 65_536])
def test_demo_shows_the_launch_that_it_does(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints, given to ``agentserve launch``, is the same server."""
    overrides = demo_overrides(Path("m3"), 31_000, 31_001, capacity, "gittins", "gate:0.9")
    done = load_recipe(find_recipe("tiny-cpu"), overrides)
    seen: list[Recipe] = []

    def look(recipe: Recipe) -> None:
        seen.append(recipe)
        raise RecipeError("seen")

    monkeypatch.setattr("agentserve.cli.launch.preflight", look)
    assert CliRunner().invoke(command, launch_arguments("tiny-cpu", overrides)).exit_code == 2
    assert seen == [done]
    assert done.kv.capacity_tokens == capacity
    assert (done.context_length is None) == (capacity > 32_768)


def test_demo_explains_what_short_memory_costs(tmp_path: Path) -> None:
    """The README's first command, with fewer sessions: real server, replay, cache events, report."""
    run = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, "-c", "from agentserve.cli import main; main()", "demo", "--sessions", "3",
         "--capacity", "1536", "--out", str(run), "--checkpoint", str(tmp_path / "m3")],
        capture_output=True, text=True, cwd=tmp_path, timeout=380,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: kv.capacity" not in done.stderr
    report = json.loads((run / "report.json").read_text())
    causes = {row["cause"]: row["tokens"] for row in report["attribution"]["causes"]}
    assert causes["evicted"] > 0
    assert causes["unexplained"] == 0
    (compare,) = re.findall(r"^  agentserve (compare .*)$", done.stderr, re.MULTILINE)
    assert compare == f"compare {run} {run}-2"
