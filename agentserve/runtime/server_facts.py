"""What a server tells of itself in ``/server_info`` beside its arguments: variables that decide which path runs, the
GPU, the checkpoint's config. SGLang reports none of them. Knows nothing of SGLang; read by ``agentserve/audit``.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

from agentserve.runtime.index_reuse import PRODUCERS_VARIABLE, REUSE_VARIABLE, ROCM_VARIABLE
from offload.settings import SETTINGS_VARIABLE

Device = Literal["cpu", "cuda", "rocm"]

ASKED_VARIABLE = "AGENTSERVE_SERVER_FACTS"  # set by agentserve launch; without it nothing of this touches SGLang

# All that a path depends on and nothing else: an environment holds secrets too.
VARIABLES = (
    REUSE_VARIABLE,
    PRODUCERS_VARIABLE,
    ROCM_VARIABLE,
    SETTINGS_VARIABLE,
    "SGLANG_DISABLE_MSA",
    "SGLANG_USE_AITER",
    "SGLANG_OPT_USE_MINIMAX_GLUON_PREFILL",
    "SGLANG_M3_ALLOW_CUSTOM_AR",
    "ROCM_QUICK_REDUCE_QUANTIZATION",
    "ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16",
)

# Fields of /server_info. Texts, numbers and booleans are kept in the header of a recorded run, the config is not.
ENVIRONMENT = "agentserve_environment"  # NAME=VALUE words, quoted for a shell
ARCHITECTURE = "agentserve_architecture"  # cpu, sm_90, gfx950
MSA_INSTALLED = "agentserve_msa_installed"
CONFIG = "agentserve_config"

_NOT_ABOUT_PATHS = ("vision_config", "quantization_config")  # large, and no path depends on them


def asked_for(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the server was launched by agentserve, which wants to be told."""
    return environment.get(ASKED_VARIABLE) == "1"


def server_facts(
    architecture: str, config: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Fields for ``/server_info``.

    Args:
        architecture: ``cpu``, or the GPU's: ``sm_90``, ``gfx950``.
        config: the checkpoint's parsed ``config.json``; None where it cannot be read.
        environment: of the process that runs the model.
    """
    told = {name: environment[name] for name in VARIABLES if name in environment}
    if told.get(SETTINGS_VARIABLE):
        told[SETTINGS_VARIABLE] = "1"  # that there is offload; its addresses are nobody's business
    words = [f"{name}={value}" for name, value in told.items()]
    facts: dict[str, Any] = {
        ENVIRONMENT: shlex.join(words),
        ARCHITECTURE: architecture,
        MSA_INSTALLED: find_spec("fmha_sm100") is not None,
    }
    if config is not None:
        facts[CONFIG] = {name: value for name, value in config.items() if name not in _NOT_ABOUT_PATHS}
    return facts


def environment_told(info: Mapping[str, Any]) -> Mapping[str, str] | None:
    """The variables of ``VARIABLES`` that are set in a server; None where it does not tell."""
    text = info.get(ENVIRONMENT)
    return None if text is None else dict(word.split("=", 1) for word in shlex.split(str(text)))


def device_told(info: Mapping[str, Any]) -> Device | None:
    """Where a server runs; None where it does not tell. SGLang itself calls ROCm cuda."""
    architecture = info.get(ARCHITECTURE)
    if architecture is None:
        return None
    return "cpu" if architecture == "cpu" else "rocm" if str(architecture).startswith("gfx") else "cuda"
