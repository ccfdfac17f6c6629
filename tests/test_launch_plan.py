"""Recipe to command: pure, and the same thing that is shown is run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentserve.launch.facts import CheckpointFacts
from agentserve.launch.plan import LaunchPlan, PlanError, base_url, cache_dtypes, make_plan, rank_cores
from agentserve.launch.recipe import Recipe

CONFIG = {
    "architectures": ["MiniMaxM3SparseForCausalLM"],
    "torch_dtype": "bfloat16",
    "sparse_attention_config": {"sparse_block_size": 128},
    "max_position_embeddings": 32768,
}
FACTS = CheckpointFacts(Path("m"), CONFIG, ("a.safetensors",), (), 1000)


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"model": "m", "device": "cpu", "kv": {"capacity_tokens": 4096}} | fields)


def plan(facts: CheckpointFacts | None = FACTS, **fields: Any) -> LaunchPlan:
    return make_plan(recipe(**fields), facts, model="m", cwd=Path("/"))


def option(made: LaunchPlan, flag: str) -> str | None:
    return made.argv[made.argv.index(flag) + 1] if flag in made.argv else None


def test_cpu_plan() -> None:
    made = plan(dtype="float32", prefill_chunk=2048, served_name="tiny")
    assert made.argv[:5] == (sys.executable, "-m", "sglang.launch_server", "--model-path", "m")
    wanted = {
        "--device": "cpu",
        "--dtype": "float32",
        "--page-size": "128",
        "--max-total-tokens": "4096",
        "--chunked-prefill-size": "2048",
        "--attention-backend": "torch_native",
        "--served-model-name": "tiny",
        "--radix-eviction-policy": "lru",
    }
    assert {flag: option(made, flag) for flag in wanted} == wanted
    assert {"--enable-cache-report", "--enable-metrics", "--sleep-on-idle"} < set(made.argv)
    assert "--mem-fraction-static" not in made.argv
    assert "--kv-events-config" not in made.argv
    assert made.env == {
        "AGENTSERVE_SERVER_FACTS": "1",
        "SGLANG_PLATFORM": "agentserve_cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "1073741824",
        "MALLOC_TOP_PAD_": "268435456",
        "SGLANG_OPT_USE_BF16_ROUTER_GEMM": "0",
    }
    assert {"SGLANG_USE_CPU_ENGINE", "AGENTSERVE_EVICTION", "AGENTSERVE_INDEX_REUSE"} <= set(made.unset)
    assert any("page size 128" in note for note in made.notes)


def test_router_gate_stays_bf16_where_the_model_is() -> None:
    assert "SGLANG_OPT_USE_BF16_ROUTER_GEMM" not in plan(dtype="bfloat16").env
    assert "SGLANG_OPT_USE_BF16_ROUTER_GEMM" not in plan(dtype="auto").env


def test_switches() -> None:
    made = plan(cache_report=False, metrics=False, radix={"disable": True}, kv_events="tcp://*:5557")
    assert not {"--enable-cache-report", "--enable-metrics"} & set(made.argv)
    assert "--disable-radix-cache" in made.argv
    events = option(made, "--kv-events-config")
    assert events is not None
    assert orjson.loads(events) == {"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv", "bind": True}


def test_gpu_plan_leaves_the_platform_to_sglang() -> None:
    made = plan(device="cuda", tp=8, kv={"memory_fraction": 0.75}, extra_args=["--trust-remote-code"])
    assert "--sleep-on-idle" not in made.argv
    assert made.env == {"AGENTSERVE_SERVER_FACTS": "1"}
    assert {"SGLANG_USE_CPU_ENGINE", "SGLANG_PLATFORM", "AGENTSERVE_EVICTION"} <= set(made.unset)
    assert option(made, "--mem-fraction-static") == "0.75"
    assert option(made, "--device") == "cuda"
    assert "--attention-backend" not in made.argv
    assert made.argv[-1] == "--trust-remote-code"
    assert option(plan(device="rocm"), "--device") == "cuda"


def test_tensor_parallel_ranks_on_a_cpu_are_bound() -> None:
    made = plan(tp=2)
    assert made.env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert any("0|1" in note for note in made.notes)
    assert plan(tp=2, cpu={"threads_bind": "4|6"}).env["SGLANG_CPU_OMP_THREADS_BIND"] == "4|6"
    assert rank_cores(2, 4) == "0-3|4-7"


def test_recipe_env_wins_and_is_not_unset() -> None:
    made = plan(env={"OMP_NUM_THREADS": 3, "SGLANG_USE_CPU_ENGINE": 1})
    environment = made.environment({"PATH": "p", "OMP_NUM_THREADS": "9"})
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["PATH"] == "p"


def test_unset_variables_are_gone() -> None:
    assert "SGLANG_USE_CPU_ENGINE" not in plan().environment({"SGLANG_USE_CPU_ENGINE": "1"})


def test_page_size_must_be_known() -> None:
    with pytest.raises(PlanError, match="--page-size"):
        plan(facts=None)
    assert option(plan(facts=None, page_size=128), "--page-size") == "128"


def test_shown_line_runs_the_same_arguments_and_environment() -> None:
    """The printed line, given to a real shell, yields exactly argv and environment of the plan."""
    show = "import os, sys, json; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    arguments = ("--name", "it's", "a b", '{"x": "$HOME"}', "*")
    made = LaunchPlan((sys.executable, "-c", show, *arguments), {"A": "1 '2'"}, ("B",), Path("/"), "http://h:1")
    base = {"PATH": "/usr/bin:/bin", "B": "gone"}
    shown = subprocess.run(["sh", "-c", made.shell()], env=base, capture_output=True, check=True)
    direct = subprocess.run(made.argv, env=made.environment(base), capture_output=True, check=True)
    argv, environment = orjson.loads(shown.stdout)
    assert argv == list(arguments)
    assert environment["A"] == "1 '2'"
    assert "B" not in environment
    direct_environment = orjson.loads(direct.stdout)[1]
    # the shell adds its own (PWD, _)
    assert {name: environment[name] for name in direct_environment} == direct_environment
    assert shlex.split(made.shell())[-len(made.argv) :] == list(made.argv)


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_url_is_reachable(host: str, url: str) -> None:
    assert base_url(host, 1) == url


@pytest.mark.parametrize(
    ("fields", "dtypes"),
    [
        ({"dtype": "float32"}, ("float32", "float32")),
        ({}, ("bfloat16", "bfloat16")),
        ({"device": "cuda", "kv": {"dtype": "fp8_e4m3"}}, ("fp8_e4m3", "fp8_e4m3")),
        ({"device": "rocm"}, ("bfloat16", "fp8_e4m3")),
        ({"device": "rocm", "env": {"SGLANG_OPT_MINIMAX_M3_FP8_INDEX_CACHE": 0}}, ("bfloat16", "bfloat16")),
    ],
)
def test_cache_types(fields: dict[str, Any], dtypes: tuple[str, str]) -> None:
    assert cache_dtypes(recipe(**fields), FACTS) == dtypes


def test_sglang_serves_float32_checkpoints_in_float16_unless_told() -> None:
    facts = CheckpointFacts(Path("m"), CONFIG | {"torch_dtype": "float32"}, (), (), 0)
    assert cache_dtypes(recipe(), facts) == ("float16", "float16")
