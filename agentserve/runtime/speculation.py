"""How ``agentserve launch --eagle3`` tells the server's processes what to do, and golden acceptance lengths. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from typing import Literal, NamedTuple

import yaml

MODE_VARIABLE = "AGENTSERVE_EAGLE3"
KEYS_VARIABLE = "AGENTSERVE_EAGLE3_KEYS"
LAYERS_VARIABLE = "AGENTSERVE_EAGLE3_LAYERS"
# SGLang's own switches of synthetic acceptance (srt/environ.py, 0.5.23).
LENGTH_VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
METHOD_VARIABLE = "SGLANG_SIMULATE_ACC_METHOD"
TOKENS_VARIABLE = "SGLANG_SIMULATE_ACC_TOKEN_MODE"
VARIABLES = (MODE_VARIABLE, KEYS_VARIABLE, LAYERS_VARIABLE, LENGTH_VARIABLE, METHOD_VARIABLE, TOKENS_VARIABLE)

Mode = Literal["real", "synthetic"]
Keys = Literal["token", "pair"]

GOLDEN_DRAFT = "Inferact/MiniMax-M3-EAGLE3-GQA"


class SpeculationSettings(NamedTuple):
    """EAGLE3 as one launch runs it.

    Attributes:
        keys: what the radix tree is keyed by: tokens, or SGLang's pairs of a token and its successor.
        layers: target layers (from 0) after which the draft's hidden states are taken.
        length: synthetic acceptance length in tokens per verification step; None: real verification.
    """

    keys: Keys = "token"
    layers: tuple[int, ...] = ()
    length: float | None = None

    @property
    def mode(self) -> Mode:
        return "real" if self.length is None else "synthetic"

    def environment(self) -> dict[str, str]:
        """Variables for the server: ours, and SGLang's own switches of synthetic acceptance."""
        variables = {
            MODE_VARIABLE: self.mode,
            KEYS_VARIABLE: self.keys,
            LAYERS_VARIABLE: ",".join(str(layer) for layer in self.layers),
        }
        if self.length is not None:
            variables |= {
                LENGTH_VARIABLE: f"{self.length:g}",
                # Every step takes the next lower or the next higher whole length, drawn so that the mean is right.
                METHOD_VARIABLE: "match-expected",
                # The draft's own tokens are kept: the costs of drafting and of the growing sequence stay real.
                TOKENS_VARIABLE: "real-draft-token",
            }
        return variables


def settings_from(environment: Mapping[str, str] = os.environ) -> SpeculationSettings | None:
    """What was asked for; None where nothing was, and then nothing of this may touch SGLang.

    Raises:
        ValueError: a variable holds what ``environment`` never writes.
    """
    mode = environment.get(MODE_VARIABLE)
    if not mode:
        return None
    keys = environment.get(KEYS_VARIABLE) or "token"
    if keys not in ("token", "pair"):
        raise ValueError(f"{KEYS_VARIABLE} is {keys!r}: it must be token or pair")
    layers = environment.get(LAYERS_VARIABLE) or ""
    length = environment.get(LENGTH_VARIABLE)
    settings = SpeculationSettings(
        "token" if keys == "token" else "pair",
        tuple(int(layer) for layer in layers.split(",") if layer),
        # SGLang takes a length of 0 or less as "off".
        float(length) if length and float(length) > 0 else None,
    )
    if settings.mode != mode:
        raise ValueError(
            f"{MODE_VARIABLE} is {mode!r} but {LENGTH_VARIABLE} is {length!r}: results would carry the wrong label; "
            "set the mode with agentserve launch --synthetic-acceptance, not with SGLang's variable"
        )
    return settings


def golden_curves() -> dict[str, dict[str, dict[int, float]]]:
    """Measured acceptance lengths: draft -> thinking ("on", "off") -> drafts a step -> length. The file names its
    sources."""
    text = (files("agentserve") / "data" / "golden_acceptance.yaml").read_text(encoding="utf-8")
    curves: dict[str, dict[str, dict[int, float]]] = yaml.safe_load(text)
    return curves


def golden_length(steps: int, *, draft: str = GOLDEN_DRAFT, thinking: Literal["on", "off"] = "on") -> float:
    """The measured acceptance length of a published draft.

    Args:
        steps: drafts per verification step.

    Raises:
        ValueError: nothing was published for it; the message lists what was.
    """
    curves = golden_curves()
    if draft not in curves:
        raise ValueError(f"no golden acceptance length for the draft {draft!r}; there are {', '.join(curves)}")
    curve = curves[draft][thinking]
    if steps not in curve:
        raise ValueError(
            f"no golden acceptance length for {steps} drafts a step; there are {min(curve)} to {max(curve)}"
        )
    return curve[steps]
