"""What a server tells of itself: no question of the audit is left open, and nothing else leaves the server."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
from click.testing import CliRunner

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from agentserve.audit import AuditRow, Metrics, audit_rows  # noqa: E402
from agentserve.audit.facts import Facts  # noqa: E402
from agentserve.audit.recorded import audit_of_run  # noqa: E402
from agentserve.audit.rows import PATHS  # noqa: E402
from agentserve.cli.audit import command  # noqa: E402
from agentserve.launch.plan import make_plan  # noqa: E402
from agentserve.launch.recipe import Recipe  # noqa: E402
from agentserve.runtime import sglang_plugin, sglang_server_facts  # noqa: E402
from agentserve.runtime.server_facts import (  # noqa: E402
    ARCHITECTURE,
    CONFIG,
    ENVIRONMENT,
    VARIABLES,
    asked_for,
    device_told,
    environment_told,
    server_facts,
)
from agentserve.shapes.model import read_sizes  # noqa: E402
from agentserve.shapes.published import M3_CONFIG  # noqa: E402
from offload.settings import OffloadSettings  # noqa: E402
from tests.servers import TinyServer  # noqa: E402
from traces.replay.clients import sglang  # noqa: E402

NOTHING = Metrics([])
GRAPHS = {phase: {"backend": "full", "max_bs": 64} for phase in ("decode", "prefill")}


def told(device: str, architecture: str, tp: int = 8, **environment: str) -> dict[str, Any]:
    """``/server_info`` of a launched server, as it comes over the wire."""
    info = {
        "device": "cpu" if device == "cpu" else "cuda",
        "tp_size": tp,
        "page_size": 128,
        "cuda_graph_config": GRAPHS,
        "max_running_requests": 64,
        "chunked_prefill_size": 8192,
    }
    sent: dict[str, Any] = orjson.loads(orjson.dumps(info | server_facts(architecture, M3_CONFIG, environment)))
    return sent


def audit(info: dict[str, Any], **known: Any) -> dict[str, AuditRow]:
    return {row.path: row for row in audit_rows(info, NOTHING, **known)}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"AGENTSERVE_INDEX_REUSE": "freq:4"},
        {"SGLANG_MINIMAX_M3_INDEX_TOPK_FREQ": "4", "SGLANG_USE_AITER": "1"},
        {"ROCM_QUICK_REDUCE_QUANTIZATION": "INT4", "SGLANG_M3_ALLOW_CUSTOM_AR": "1"},
        {"SGLANG_DISABLE_MSA": "1"},
    ],
)
@pytest.mark.parametrize(
    ("device", "architecture"), [("cpu", "cpu"), ("cuda", "sm_90"), ("cuda", "sm_100"), ("rocm", "gfx950")]
)
@pytest.mark.parametrize("tp", [1, 8])
def test_a_launched_server_leaves_nothing_open(
    environment: dict[str, str], device: str, architecture: str, tp: int
) -> None:
    rows = audit(told(device, architecture, tp, **environment))
    open_rows = [row for row in rows.values() if row.configured is None or row.eligible is None]
    assert open_rows == []
    # Each of these says what a server without us leaves open.
    foreign = audit({"device": "cuda", "tp_size": tp, "page_size": 128})
    for path in ("index reuse", "MSA kernel", "AITER sparse paged attention", "quantized all-reduce"):
        assert foreign[path].configured is None


def test_what_is_told_decides_the_rows() -> None:
    reuse = audit(told("cuda", "sm_90", AGENTSERVE_INDEX_REUSE="freq:4", AGENTSERVE_INDEX_PRODUCERS="keep"))
    assert (reuse["index reuse"].configured, reuse["index reuse"].setting) == (True, "AGENTSERVE_INDEX_REUSE=freq:4")
    assert reuse["index producer skip"].configured is False
    msa = audit(told("cuda", "sm_100"))["MSA kernel"]
    assert msa.configured
    assert "this is sm_100, not installed" in msa.condition  # no GPU kernels in the environment of the tests
    installed = audit(told("cuda", "sm_100") | {"agentserve_msa_installed": True})["MSA kernel"]
    assert (installed.eligible, installed.verdict) == (True, "not proven")
    assert audit(told("cuda", "sm_90") | {"agentserve_msa_installed": True})["MSA kernel"].eligible is False
    assert audit(told("cuda", "sm_100", SGLANG_DISABLE_MSA="1"))["MSA kernel"].verdict == "off"
    aiter = {arch: audit(told("rocm", arch, SGLANG_USE_AITER="1")) for arch in ("gfx950", "gfx942")}
    assert aiter["gfx950"]["AITER sparse paged attention"].eligible is True
    assert aiter["gfx942"]["AITER sparse paged attention"].condition == "gfx95, this is gfx942"


def test_a_recorded_run_keeps_what_the_server_told() -> None:
    """The server is gone: its header holds all but the config, which comes from the model's folder or name."""
    info = told("cuda", "sm_90", AGENTSERVE_INDEX_REUSE="freq:4") | {"model_path": "MiniMaxAI/MiniMax-M3"}
    kept = sglang._plain_args(info)
    assert CONFIG not in kept
    lines = {line.path: line for line in audit_of_run(kept, ("", ""))}
    assert [line for line in lines.values() if line.configured is None or line.eligible is None] == []
    assert lines["index reuse"].configured
    assert lines["CUDA graph, decode"].condition == "batches up to 64 sequences"


def test_the_servers_word_counts_before_a_recipe() -> None:
    """Someone exported a variable in the shell, or names the recipe of another launch."""
    rows = audit(told("cuda", "sm_90"), environment={"AGENTSERVE_INDEX_REUSE": "freq:4"}, device="rocm", config={})
    assert rows["index reuse"].configured is False
    assert rows["AITER sparse paged attention"].condition == "gfx95, this is cuda"


def test_secrets_and_other_variables_stay_in_the_server() -> None:
    value = 'a "b" c=$d'
    environment = {"HF_TOKEN": "secret", "SGLANG_DISABLE_MSA": value, "PATH": "/bin"}
    facts = server_facts("cpu", None, environment | OffloadSettings(host="10.0.0.7").environment())
    assert environment_told(facts) == {"SGLANG_DISABLE_MSA": value, "AGENTSERVE_OFFLOAD": "1"}
    assert "10.0.0.7" not in str(facts)
    assert "secret" not in str(facts)
    assert "/bin" not in str(facts)
    assert CONFIG not in facts
    assert environment_told({}) is None
    assert environment_told(server_facts("cpu", None, {})) == {}


def test_what_no_path_depends_on_is_left_out_of_the_config() -> None:
    config = {**M3_CONFIG, "quantization_config": {"ignore": ["layer"] * 1000}, "vision_config": {}}
    assert server_facts("cpu", config, {})[CONFIG] == M3_CONFIG


class Watched(Mapping[str, str]):
    """An environment in which everything is set to 1, and which remembers what was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return "" if name.startswith("AGENTSERVE_") else "1"

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_each_variable_that_a_path_reads_is_told() -> None:
    watched = Watched()
    info = {"tp_size": 8, "enable_lmcache": True, "device": "cuda"}
    metrics = Metrics.from_text("sglang:kv_cache_memory_usage_gb 1\nsglang:max_total_num_tokens 1280\n")
    facts = Facts(info, M3_CONFIG, read_sizes(M3_CONFIG), watched, "rocm")
    for path in PATHS:
        path(facts, metrics)
    assert watched.asked <= set(VARIABLES)
    # The codec must be one for its cast to matter.
    assert watched.asked >= set(VARIABLES) - {"ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16"}


# --- the hook


def test_the_hook_is_registered_for_what_agentserve_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(
        Recipe.model_validate({"model": "m", "device": "cuda", "page_size": 128}), None, model="m", cwd=Path("/")
    )
    assert asked_for(plan.env)
    assert not asked_for({})
    (hook,) = sglang_plugin.server_fact_hooks()
    owner, _, name = hook.target.rpartition(".")
    target = inspect.unwrap(getattr(pkgutil.resolve_name(owner), name))
    assert list(inspect.signature(target).parameters) == ["self"]
    assert len(hook.reason) > 20


def test_architectures_are_named_as_the_audit_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch answers on an H200, a B300 and an MI355X; this machine has none of them."""
    named = []
    for capability in ((9, 0), (10, 3)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        named.append(sglang_server_facts.architecture("cuda"))
    monkeypatch.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    named.append(sglang_server_facts.architecture("cuda"))
    named.append(sglang_server_facts.architecture("cpu"))
    assert named == ["sm_90", "sm_103", "gfx950", "cpu"]
    assert [device_told({ARCHITECTURE: name}) for name in named] == ["cuda", "cuda", "rocm", "cpu"]


def test_what_the_scheduler_says_reaches_server_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own function that builds the answer, on what our hook returned."""
    from sglang.srt.utils import common

    (tmp_path / "config.json").write_bytes(orjson.dumps(M3_CONFIG))
    monkeypatch.setenv("AGENTSERVE_INDEX_REUSE", "freq:4")
    args = SimpleNamespace(
        device="cpu",
        model_path=str(tmp_path),
        resolved_dict=lambda: {"device": "cpu", "tp_size": 1},
        launch_command="x",
    )
    monkeypatch.setattr(common, "describe_kv_events_publisher", lambda args: None)
    said = sglang_server_facts.tell({"status": "ready"}, SimpleNamespace(server_args=args))
    info = common.build_server_info(args, said)
    assert info["status"] == "ready"
    assert info[ENVIRONMENT] == "AGENTSERVE_INDEX_REUSE=freq:4"
    rows = audit(info)
    assert rows["index reuse"].configured
    assert rows["index reuse"].condition.endswith("57")


@pytest.mark.server
def test_a_real_server_tells_without_a_recipe(tiny_server: TinyServer) -> None:
    result = CliRunner().invoke(command, [tiny_server.url, "--json"])
    assert result.exit_code == 0, result.output
    rows = {row["path"]: row for row in orjson.loads(result.stdout)}
    assert [row for row in rows.values() if row["configured"] is None or row["eligible"] is None] == []
    assert rows["index reuse"]["setting"] == "AGENTSERVE_INDEX_REUSE is not set"
    assert rows["index reuse"]["condition"].endswith(": 5")  # of the tiny checkpoint's own config
