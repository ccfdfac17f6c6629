"""Offload in recipes, plans, checks and the command line, without starting a server."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.cli.launch import command
from agentserve.launch.daemon import daemon_plan
from agentserve.launch.facts import read_facts
from agentserve.launch.host import free_port
from agentserve.launch.offload_checks import check_offload
from agentserve.launch.plan import make_plan
from agentserve.launch.preflight import check_shared_kv, rank_bytes_per_token
from agentserve.launch.recipe import Override, Recipe, RecipeError, find_recipe, load_recipe
from offload import lmcache_copies
from offload.settings import SETTINGS_VARIABLE, OffloadError, settings_from


def recipe(checkpoint: Path | str = "m3", **fields: Any) -> Recipe:
    values = {"model": str(checkpoint), "offload.backend": "lmcache", **fields}
    return load_recipe(find_recipe("tiny-cpu"), [Override(k, v, "test") for k, v in values.items()])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offload.backend": None, "offload.l2": "redis://a:1"}, "l2: set backend too, or pass --offload lmcache"),
        ({"offload.address": "1.2.3.4:5", "offload.memory_gb": 3}, "memory_gb: a daemon that runs already decides"),
        ({"offload.address": "here"}, "write it as host:port"),
        ({"offload.l2": "http://a"}, "write it as redis://host:port"),
        ({"offload.http_port": 5555}, "both 5555"),
        ({"offload.memroy_gb": 3}, "did you mean 'memory_gb'"),
        ({"offload.load_deadline": 0}, "greater than 0"),
        ({"radix.disable": True}, "offload needs the radix cache"),
        ({"eagle3.draft": "draft", "eagle3.radix_keys": "pair"}, "needs a radix tree keyed by tokens"),
        ({"eagle3.draft": "draft", "device": "rocm"}, "tried on a CPU and on CUDA only"),
        ({"extra_args": ["--enable-lmcache"]}, "set the field 'offload.backend' instead"),
    ],
)
def test_what_cannot_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")):
        recipe(**fields)


def test_a_draft_and_offload_go_together_on_cuda() -> None:
    assert recipe(**{"eagle3.draft": "draft", "device": "cuda"}).offload.backend == "lmcache"


def test_the_plan_carries_the_settings_and_nothing_without_offload(tiny_checkpoint: Path) -> None:
    facts = read_facts(tiny_checkpoint)
    made = make_plan(
        recipe(tiny_checkpoint, **{"offload.load_deadline": 1.5, "offload.verify": False}),
        facts,
        model="m",
        cwd=Path("."),
    )
    assert "--enable-lmcache" in made.argv
    settings = settings_from(made.env)
    assert settings is not None
    assert (settings.port, settings.load_deadline, settings.verify) == (5555, 1.5, False)
    plain = make_plan(recipe(tiny_checkpoint, **{"offload.backend": None}), facts, model="m", cwd=Path("."))
    assert "--enable-lmcache" not in plain.argv
    assert SETTINGS_VARIABLE in plain.unset
    assert not [name for name in plain.env if name.startswith("LMCACHE_")]


def test_a_running_daemon_is_used_as_given() -> None:
    made = recipe(**{"offload.address": "127.0.0.1:7000"}).offload
    assert not made.starts_daemon
    assert (made.settings(1).host, made.settings(1).port) == ("127.0.0.1", 7000)
    assert made.settings(1).tiers == "unknown"
    assert recipe().offload.settings(1).tiers == "host"
    assert recipe(**{"offload.l2": "redis://127.0.0.1:7000"}).offload.settings(1).tiers == "told"


def flags(recipe: Recipe, *names: str) -> list[tuple[str, ...]]:
    """Values of the daemons' options, daemon by daemon."""
    argvs = [daemon_plan(spec, Path(".")).argv for spec in recipe.offload.specs(recipe.tp)]
    return [tuple(argv[argv.index(name) + 1] for name in names) for argv in argvs]


def test_each_rank_has_a_daemon_with_its_part_of_the_memory() -> None:
    made = recipe(**{"tp": 2, "offload.memory_gb": 3})
    names = ("--port", "--http-port", "--l1-size-gb", "--max-gpu-workers")
    assert flags(made, *names) == [("5555", "5556", "1.5", "1"), ("5557", "5558", "1.5", "1")]
    settings = made.offload.settings(2)
    assert settings_from(settings.environment()) == settings
    assert [settings.address(rank, 2) for rank in range(2)] == [("127.0.0.1", 5555), ("127.0.0.1", 5557)]
    alone = recipe(**{"offload.memory_gb": 3}).offload
    assert alone.settings(1).rank_addresses == ()
    with pytest.raises(OffloadError, match="2 daemons for 4 tensor-parallel ranks"):
        settings.address(0, 4)


def test_one_daemon_can_serve_all_ranks() -> None:
    made = recipe(**{"tp": 2, "offload.memory_gb": 3, "offload.daemons": "one"})
    assert flags(made, "--port", "--l1-size-gb", "--max-gpu-workers") == [("5555", "3", "2")]
    assert made.offload.settings(2).address(1, 2) == ("127.0.0.1", 5555)


def test_running_daemons_are_one_or_one_a_rank(tiny_checkpoint: Path) -> None:
    facts = read_facts(tiny_checkpoint)
    fields = {"tp": 2, "offload.address": "127.0.0.1:7000, 127.0.0.1:7001"}
    made = recipe(tiny_checkpoint, **fields)
    assert made.offload.settings(2).address(1, 2) == ("127.0.0.1", 7001)
    assert not list(check_offload(made, facts, 1 << 40))
    wrong = recipe(tiny_checkpoint, **{**fields, "offload.address": "127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002"})
    (finding,) = check_offload(wrong, facts, 1 << 40)
    assert "3 daemons for 2 tensor-parallel ranks" in finding.what
    assert finding.fix == "name one daemon, or 2 with commas between"


def test_ports_of_two_ranks_must_not_meet(tiny_checkpoint: Path) -> None:
    made = recipe(tiny_checkpoint, **{"tp": 2, "offload.port": 65533, "offload.http_port": 65535})
    found = [f"{f.what} | {f.fix}" for f in check_offload(made, read_facts(tiny_checkpoint), 1 << 40)]
    assert found == [
        "offload.port of rank 1: 65535 is offload.http_port of rank 0 too | set offload.port: rank r takes it plus 2 r",
        "offload.http_port of rank 1: 65537 is no port | set offload.http_port: rank r takes it plus 2 r",
    ]


def test_checks_name_field_and_remedy(tiny_checkpoint: Path) -> None:
    facts = read_facts(tiny_checkpoint)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = recipe(
            tiny_checkpoint,
            **{"offload.port": port, "offload.http_port": free_port(), "offload.chunk_tokens": 200},
        )
        found = [f"{f.what} | {f.fix}" for f in check_offload(made, facts, 1_000_000_000)]
    assert len(found) == 3
    assert "chunk_tokens 200 is not a multiple of the page size 128 | set it to 128" in found[0]
    assert f"offload.port: 127.0.0.1:{port}" in found[1]
    assert "memory_gb 4 is more than the 1.0 GB available" in found[2]


def test_on_cuda_lmcaches_compiled_copies_have_to_load(tiny_checkpoint: Path) -> None:
    """The real import, which fails where torch is built without CUDA, and says why."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA: the copies may load")
    made = recipe(tiny_checkpoint, device="cuda", dtype="bfloat16")
    (finding,) = [f for f in check_offload(made, read_facts(tiny_checkpoint), 1 << 40) if "copies" in f.what]
    assert (finding.level, lmcache_copies.BUILD_COMMAND in finding.fix) == ("error", True)
    assert f"with torch {torch.__version__}: ImportError: lib" in finding.what
    assert lmcache_copies.cuda_copies_problem(timeout_s=0.01) == "importing them took more than 0 s"


def test_shared_memory_has_to_hold_the_kv_cache(tiny_checkpoint: Path, tmp_path: Path) -> None:
    facts = read_facts(tiny_checkpoint)
    made = recipe(tiny_checkpoint)
    (finding,) = check_shared_kv(made, facts, 64 << 20)
    assert "KV cache of 0.2 GB lies in /dev/shm" in finding.what
    assert "0.1 GB are free" in finding.what
    assert "--shm-size" in finding.fix
    assert "which is missing" in next(check_shared_kv(made, facts, None)).what
    assert not list(check_shared_kv(made, facts, 1 << 30))
    # All ranks' caches lie there, and a draft's.
    capacity = made.kv.capacity_tokens or 0
    two = recipe(tiny_checkpoint, tp=2)
    both = 2 * rank_bytes_per_token(two, facts) * capacity
    assert list(check_shared_kv(two, facts, both - 1))
    assert not list(check_shared_kv(two, facts, both))
    draft = read_facts(write_tiny_eagle3(tmp_path / "draft"))
    assert list(check_shared_kv(two, facts, both, draft))


def test_the_command_line_shows_what_would_run(tiny_checkpoint: Path) -> None:
    options = ["--model", str(tiny_checkpoint), "--port", str(free_port()), "--dry-run"]
    ports = ["--set", f"offload.port={free_port()}", "--set", f"offload.http_port={free_port()}"]
    result = CliRunner().invoke(command, ["tiny-cpu", *options, *ports, "--offload", "lmcache"])
    assert result.exit_code == 0, result.output
    assert "--enable-lmcache" in result.output
    result = CliRunner().invoke(command, ["tiny-cpu", *options, "--offload-l2", "redis://box:6379"])
    assert result.exit_code == 2
    assert "--offload lmcache" in result.output
