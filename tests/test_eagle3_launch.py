"""EAGLE3 from the command line to SGLang's arguments, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape, write_tiny_eagle3
from agentserve.cli import main
from agentserve.launch.draft import DRAFT_ARCHITECTURE, draft_faults
from agentserve.launch.facts import read_facts
from agentserve.launch.plan import LaunchPlan, PlanError, make_plan
from agentserve.launch.preflight import (
    PROCESS_BYTES,
    check_ram,
    preflight,
    rank_bytes_per_token,
    served_weight_bytes,
)
from agentserve.launch.recipe import Recipe, RecipeError, find_recipe, load_recipe, parse_set
from agentserve.runtime.speculation import (
    SpeculationSettings,
    golden_curves,
    golden_length,
    settings_from,
)

TARGET = TinyM3Shape().hf_config(bos_id=1, eos_id=2)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle3(tmp_path_factory.mktemp("draft") / "tiny-eagle3")


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"model": "m", "device": "cpu", "kv": {"capacity_tokens": 4096}} | fields)


def plan(draft: Path, **eagle3: Any) -> LaunchPlan:
    made = recipe(page_size=128, eagle3={"draft": str(draft), **eagle3})
    return make_plan(made, None, model="m", cwd=Path("/"), draft=read_facts(draft))


def option(made: LaunchPlan, flag: str) -> str | None:
    return made.argv[made.argv.index(flag) + 1] if flag in made.argv else None


def test_the_plan_names_everything_that_sglang_would_guess(draft: Path) -> None:
    made = plan(draft)
    wanted = {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(draft),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
        "--speculative-draft-attention-backend": "torch_native",
    }
    assert {flag: option(made, flag) for flag in wanted} == wanted
    settings = settings_from(made.env)
    assert settings == SpeculationSettings("token", (0, 2, 4), None)
    assert settings.mode == "real"
    # left over from another launch, it would make acceptance synthetic
    assert "SGLANG_SIMULATE_ACC_LEN" in made.unset
    assert any("after layers [0, 2, 4] (the draft's config)" in note for note in made.notes)


def test_the_drafts_backend_is_its_own() -> None:
    made = recipe(
        device="cuda", page_size=128, attention_backend="fa3", eagle3={"draft": "d", "capture_layers": [1, 2]}
    )
    planned = make_plan(made, None, model="m", cwd=Path("/"))
    assert option(planned, "--attention-backend") == "fa3"
    assert option(planned, "--speculative-draft-attention-backend") == "triton"
    assert settings_from(planned.env) == SpeculationSettings("token", (1, 2))


def test_without_a_draft_nothing_of_it_is_in_the_plan() -> None:
    made = make_plan(recipe(page_size=128), None, model="m", cwd=Path("/"))
    assert not [word for word in made.argv if "speculative" in word]
    assert settings_from(made.env) is None
    assert "AGENTSERVE_EAGLE3" in made.unset


def test_golden_and_given_lengths_are_synthetic_and_say_so(draft: Path) -> None:
    golden = plan(draft, synthetic_length="golden", steps=3)
    assert settings_from(golden.env) == SpeculationSettings("token", (0, 2, 4), 2.78)
    assert golden.env["SGLANG_SIMULATE_ACC_METHOD"] == "match-expected"
    assert golden.env["SGLANG_SIMULATE_ACC_TOKEN_MODE"] == "real-draft-token"
    assert any("synthetic acceptance of 2.78" in note for note in golden.notes)
    assert settings_from(plan(draft, synthetic_length=1.5).env) == SpeculationSettings("token", (0, 2, 4), 1.5)


def test_a_length_set_behind_our_back_is_refused() -> None:
    with pytest.raises(ValueError, match="wrong label"):
        settings_from({"AGENTSERVE_EAGLE3": "real", "SGLANG_SIMULATE_ACC_LEN": "2.5"})
    # SGLang's own default, off
    assert settings_from({"AGENTSERVE_EAGLE3": "real", "SGLANG_SIMULATE_ACC_LEN": "-1"}) == SpeculationSettings()


def test_golden_curves() -> None:
    assert golden_length(3) == 2.78
    assert golden_length(3, thinking="off") == 2.97
    for curves in golden_curves().values():
        for curve in curves.values():
            assert list(curve) == list(range(1, 9))
            assert all(1 < length <= steps + 1 for steps, length in curve.items())
    with pytest.raises(ValueError, match="for 9 drafts a step; there are 1 to 8"):
        golden_length(9)
    with pytest.raises(ValueError, match="there are Inferact/MiniMax-M3-EAGLE3-GQA, "):
        golden_length(3, draft="another")


@pytest.mark.parametrize(
    ("eagle3", "message"),
    [
        ({"steps": 2}, "steps: set draft too"),
        ({"draft": "d", "synthetic_length": 4.5}, r"4.5 is above 3 steps \+ 1"),
        ({"draft": "d", "synthetic_length": "golden", "steps": 12}, "no golden acceptance length for 12"),
        ({"draft": "d", "capture_layers": [-1]}, "greater than or equal to 0"),
    ],
)
def test_impossible_recipes(eagle3: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe(eagle3=eagle3)


def test_recipe_errors_name_the_option() -> None:
    with pytest.raises(RecipeError, match=r"--set eagle3.steps=0, field 'eagle3.steps'"):
        load_recipe(find_recipe("tiny-cpu"), [parse_set("eagle3.draft=d"), parse_set("eagle3.steps=0")])
    with pytest.raises(RecipeError, match=r"env holds SGLANG_SIMULATE_ACC_LEN.*set eagle3.synthetic_length"):
        load_recipe(find_recipe("tiny-cpu"), [parse_set("env={SGLANG_SIMULATE_ACC_LEN: 2}")])
    with pytest.raises(RecipeError, match=r"extra_args holds --speculative-num-steps; set the field 'eagle3.steps'"):
        load_recipe(find_recipe("tiny-cpu"), [parse_set("extra_args=['--speculative-num-steps=5']")])


def test_layers_that_nobody_names_are_an_error(tmp_path: Path) -> None:
    config = TinyDraftShape(TinyM3Shape()).hf_config()
    del config["eagle_config"]
    folder = write_tiny_eagle3(tmp_path / "d")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(PlanError, match=r"eagle3.capture_layers"):
        plan(folder)
    assert settings_from(plan(folder, capture_layers=[1, 2, 3]).env) == SpeculationSettings("token", (1, 2, 3))


@pytest.mark.parametrize(
    ("change", "layers", "what"),
    [
        ({"hidden_size": 64, "target_hidden_size": 64}, None, "hidden states of 64, but the target's have 128"),
        ({"vocab_size": 1000}, None, "'vocab_size' is 1000, but the target's is 320"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}, None, "[6] are not layers of the target"),
        ({}, [0, 1], "2 capture layers are named, but its weights take 3"),
    ],
)
def test_a_draft_of_another_target(change: dict[str, Any], layers: list[int] | None, what: str) -> None:
    config = TinyDraftShape(TinyM3Shape()).hf_config() | change
    faults = list(draft_faults(TARGET, config, DRAFT_ARCHITECTURE, layers))
    assert len(faults) == 1
    assert what in faults[0][0]


def test_a_fitting_draft_has_no_fault_and_another_model_does() -> None:
    config = TinyDraftShape(TinyM3Shape()).hf_config()
    assert list(draft_faults(TARGET, config, DRAFT_ARCHITECTURE, None)) == []
    ((what, _),) = draft_faults(TARGET, TARGET, "MiniMaxM3SparseForCausalLM", None)
    assert "not LlamaForCausalLMEagle3" in what


def test_preflight_reads_the_draft(tiny_checkpoint: Path, draft: Path, tmp_path: Path) -> None:
    fields = {"model": str(tiny_checkpoint), "port": 31999}
    good = preflight(recipe(**fields, eagle3={"draft": str(draft)}))
    assert good.draft is not None
    assert good.draft.capture_layers == [0, 2, 4]
    # K and V of its one layer, 4 heads of 32, in float32, beside those of the target
    made = recipe(**fields, dtype="float32")
    facts = read_facts(tiny_checkpoint)
    assert rank_bytes_per_token(made, facts, good.draft) - rank_bytes_per_token(made, facts) == 2 * 4 * 32 * 4
    enough = served_weight_bytes(made, facts) + 4096 * rank_bytes_per_token(made, facts) + 3 * PROCESS_BYTES
    assert list(check_ram(made, facts, enough)) == []
    assert len(list(check_ram(made, facts, enough, good.draft))) == 1
    missing = preflight(recipe(**fields, eagle3={"draft": str(tmp_path / "none")}))
    (finding,) = [f for f in missing.findings if "EAGLE3 draft" in f.what]
    assert finding.level == "error"
    target = preflight(recipe(**fields, eagle3={"draft": str(tiny_checkpoint)}))
    assert any("not LlamaForCausalLMEagle3" in f.what for f in target.findings)


def test_the_written_draft_is_what_its_config_says(draft: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = load_file(draft / "model.safetensors")
    config = json.loads((draft / "config.json").read_text())
    assert tensors["fc.weight"].shape == (128, 3 * 128)
    known = tensors["d2t"] + tensors["d2t"].new_tensor(range(config["draft_vocab_size"]))
    assert tensors["lm_head.weight"].shape[0] == len(known) == len(set(known.tolist()))
    assert tensors["t2d"].nonzero().flatten().tolist() == known.tolist()
    again = load_file(write_tiny_eagle3(tmp_path / "again") / "model.safetensors")
    assert all((again[name] == tensor).all() for name, tensor in tensors.items())


def test_commands(tmp_path: Path, tiny_checkpoint: Path) -> None:
    run = CliRunner().invoke
    written = run(main, ["checkpoint", "tiny-eagle3", str(tmp_path / "d")])
    assert written.exit_code == 0, written.output
    assert "after layers 0, 2, 4" in written.output
    again = run(main, ["checkpoint", "tiny-eagle3", str(tmp_path / "d")])
    assert again.exit_code == 1
    assert "not empty" in again.output
    shown = run(
        main,
        ["launch", "tiny-cpu", "--model", str(tiny_checkpoint), "--eagle3", str(tmp_path / "d"), "--eagle3-steps", "2",
         "--synthetic-acceptance", "golden", "--dry-run"],
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "SGLANG_SIMULATE_ACC_LEN=2.39" in shown.output
    assert "--speculative-num-steps 2" in shown.output
