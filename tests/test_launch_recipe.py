"""Recipes: shipped ones load, overrides apply, and every error names file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentserve.launch.recipe import Override, RecipeError, find_recipe, load_recipe, parse_set, shipped_recipes

MINIMAL = "model: m\ndevice: cpu\nkv: {capacity_tokens: 4096}\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "r.yaml"
    path.write_text(text)
    return path


def test_shipped_recipes_are_valid() -> None:
    assert set(shipped_recipes()) == {"tiny-cpu", "m3-h200", "m3-mi355x"}
    for path in shipped_recipes().values():
        recipe = load_recipe(path)
        assert recipe.cache_report
        assert recipe.page_size in (None, 128)


def test_defaults(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert (recipe.tp, recipe.page_size, recipe.cache_report, recipe.metrics, recipe.kv_events) == (
        1, None, True, True, None,
    )  # fmt: skip


def test_overrides_apply_in_order_and_create_sections(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    recipe = load_recipe(
        path,
        [
            parse_set("kv.capacity_tokens=65536"),
            parse_set("radix.eviction_policy=slru"),
            Override("port", 1234, "--port"),
        ],
    )
    assert (recipe.kv.capacity_tokens, recipe.radix.eviction_policy, recipe.port) == (65536, "slru", 1234)


def test_choosing_one_kv_amount_drops_the_other(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\ndevice: cuda\nkv: {memory_fraction: 0.8}\n")
    recipe = load_recipe(path, [parse_set("kv.capacity_tokens=4096")])
    assert (recipe.kv.capacity_tokens, recipe.kv.memory_fraction) == (4096, None)


def test_yaml_scalars_become_strings_where_a_process_wants_them(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "env: {A: 1, B: true}\nextra_args: [--watchdog-timeout, 3600]\n")
    recipe = load_recipe(path)
    assert recipe.env == {"A": "1", "B": "1"}
    assert recipe.extra_args == ["--watchdog-timeout", "3600"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("device: cpu\nkv: {capacity_tokens: 1}\n", ["field 'model'", "is missing"]),
        (MINIMAL + "prot: 3\n", ["field 'prot'", "did you mean 'port'?"]),
        (
            "model: m\ndevice: cpu\nkv: {capcity_tokens: 9}\n",
            ["'kv.capcity_tokens'", "did you mean 'capacity_tokens'?"],
        ),
        (MINIMAL + "tp: 0\n", ["field 'tp'", "greater than or equal to 1", "got 0"]),
        (MINIMAL + "port: 70000\n", ["field 'port'", "65535"]),
        ("model: m\ndevice: gpu\n", ["field 'device'", "'cpu', 'cuda' or 'rocm'"]),
        ("model: m\ndevice: cpu\n", ["needs kv.capacity_tokens"]),
        ("model: m\ndevice: cuda\nkv: {capacity_tokens: 1, memory_fraction: 0.5}\n", ["field 'kv'", "not both"]),
        (MINIMAL + "extra_args: [--page-size=64]\n", ["--page-size", "set the field 'page_size'"]),
        (MINIMAL + "tp: 2\ncpu: {threads_bind: '0-3'}\n", ["cpu.threads_bind", "tp=2"]),
        (MINIMAL + "radix: {eviction_policy: fifo}\n", ["'radix.eviction_policy'", "'lru'"]),
        ("- a\n", ["mapping of fields"]),
        ("a: [\n", ["cannot read"]),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "tp: x\nhots: 1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("override", "part"),
    [
        (Override("port", "abc", "--port"), "--port, field 'port'"),
        (parse_set("kv.dtype=int3"), "--set kv.dtype=int3, field 'kv.dtype'"),
        (parse_set("model.path=x"), "'model' has no fields of its own"),
    ],
)
def test_a_wrong_override_is_blamed_not_the_file(tmp_path: Path, override: Override, part: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, MINIMAL), [override])
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["port", "=3", "kv.=3", ".a=1", "a=[1"])
def test_malformed_set(text: str) -> None:
    with pytest.raises(RecipeError, match="--set"):
        parse_set(text)


@pytest.mark.parametrize(("text", "value"), [("a=1", 1), ("a.b=x=y", "x=y"), ("a=", None), ("a='1'", "1")])
def test_set_values_are_yaml(text: str, value: Any) -> None:
    assert parse_set(text).value == value


def test_unknown_recipe_suggests_and_lists() -> None:
    with pytest.raises(RecipeError, match=r"m3-h200, m3-mi355x, tiny-cpu\); did you mean 'tiny-cpu'"):
        find_recipe("tiny-cpus")


def test_path_wins_where_no_shipped_name_matches(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    assert find_recipe(str(path)) == path
