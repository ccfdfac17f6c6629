"""Shared fixtures. Each server runs once per session on real SGLang; tests flush its cache instead of restarting it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from agentserve.watch.settings import WATCH_VARIABLE
from tests.registry import Registered, registered
from tests.servers import CONFIGURATIONS, Servers, TinyServer

# Images often set this. Without files of bytecode each of the many processes that the tests start compiles SGLang and
# torch anew, which takes longer than all the rest of its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Machines are shared: how long an example takes says nothing about the code.
hypothesis.settings.register_profile("shared-machine", deadline=None)
hypothesis.settings.load_profile("shared-machine")

REPOSITORY = Path(__file__).resolve().parent.parent
_RUNNING = pytest.StashKey[Servers]()


@pytest.fixture(autouse=True)
def _settings_of_one_test_are_not_the_next_ones() -> Iterator[None]:
    """Settings reach SGLang's processes by environment: what a test leaves there switches on hooks in the others."""
    before = _own_variables()
    yield
    assert _own_variables() == before, "a test left agentserve's variables in the environment"


def _own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AGENTSERVE_")}


def traces_folder() -> Path | None:
    """Real traces: $AGENTSERVE_TRACES, else ../shared/traces beside the checkout; None where there are none."""
    named = os.environ.get("AGENTSERVE_TRACES")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "traces"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def weka_archive() -> Path:
    folder = traces_folder()
    if folder is None or not (folder / "weka-claude-code.tar.xz").exists():
        pytest.skip("no real traces here; set AGENTSERVE_TRACES")
    return folder / "weka-claude-code.tar.xz"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentserve.checkpoint.tiny import write_tiny_checkpoint

    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny-m3")


@pytest.fixture(scope="session", name="servers")
def _servers(
    request: pytest.FixtureRequest, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    wanted: dict[str, list[str]] = {}
    for item in request.session.items:
        for name in CONFIGURATIONS.keys() & set(_fixtures_of(item)):
            wanted.setdefault(name, []).append(item.nodeid)
    servers = Servers(tmp_path_factory.mktemp("servers"), tiny_checkpoint, wanted)
    request.session.stash[_RUNNING] = servers
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def tiny_server(servers: Servers) -> TinyServer:
    """SGLang as it is, with memory for everything, and the watch page."""
    return servers.get("tiny_server")


@pytest.fixture(scope="session")
def small_server(servers: Servers) -> TinyServer:
    """SGLang as it is, with memory for 32 pages, publishing what its cache stores and drops."""
    return servers.get("small_server")


@pytest.fixture(scope="session")
def lru_server(servers: Servers) -> TinyServer:
    """The same memory under our policy ``lru``, with the watch page, an admin key and a request log."""
    return servers.get("lru_server")


@pytest.fixture(scope="session")
def gate_server(servers: Servers) -> TinyServer:
    """The same memory under ``gittins`` and a gate."""
    return servers.get("gate_server")


@pytest.fixture(scope="session")
def pressed_server(servers: Servers) -> TinyServer:
    """Under ``gittins``, with a journal; it takes in more than it has memory for."""
    return servers.get("pressed_server")


@pytest.fixture(scope="session")
def eagle3_server(servers: Servers) -> TinyServer:
    """With EAGLE3 and the scripted draft."""
    return servers.get("eagle3_server")


@pytest.fixture(scope="session")
def reuse_server(servers: Servers) -> TinyServer:
    """With index reuse."""
    return servers.get("reuse_server")


@pytest.fixture(scope="session")
def drafted_reuse_server(servers: Servers) -> TinyServer:
    """With index reuse by listed layers, EAGLE3 and the scripted draft, on two ranks."""
    return servers.get("drafted_reuse_server")


@pytest.fixture(scope="session")
def registered_by() -> dict[str, Registered]:
    """What agentserve registers in SGLang: asked for nothing, for a policy, for the watch page."""
    cases = {"nothing": {}, "policy": {"AGENTSERVE_EVICTION": "gittins"}, "watch": {WATCH_VARIABLE: "1"}}
    return dict(zip(cases, registered(list(cases.values())), strict=True))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last: ends a server that tests share, so it runs after all others")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)
    for item in items:
        # The first test that needs a server waits for its start, which takes minutes where processes queue for cores.
        if CONFIGURATIONS.keys() & set(_fixtures_of(item)) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    servers = item.session.stash.get(_RUNNING, None)
    if servers is not None:
        servers.finished(item.nodeid)


def _fixtures_of(item: pytest.Item) -> list[str]:
    """Of a test, with those that a parameter names."""
    names: list[str] = getattr(item, "fixturenames", [])
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return [*names, *(value for value in parameters if isinstance(value, str))]
