"""Adds our facts of a server to ``/server_info``. Checked against sglang 0.5.23.

The scheduler hands SGLang's HTTP server what it says of itself once it is ready (``get_init_info``), and all of it is
answered under ``/server_info``. The scheduler knows what the HTTP server does not: the GPU, without opening it again.
"""

from __future__ import annotations

from typing import Any

import torch

from agentserve.launch.facts import known_config
from agentserve.runtime.server_facts import server_facts


def tell(result: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """AFTER ``Scheduler.get_init_info(self)``."""
    args = scheduler.server_args
    return {**result, **server_facts(architecture(args.device), known_config(str(args.model_path)))}


def architecture(device: str) -> str:
    """``cpu``, or the first visible GPU's: ``sm_90``, ``gfx950``."""
    if device == "cpu":
        return "cpu"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(0).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
