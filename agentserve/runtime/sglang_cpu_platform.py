"""SGLang's out-of-tree platform for plain torch on a CPU (entry point ``agentserve_cpu``).

SGLang's own CPU engine (``SGLANG_USE_CPU_ENGINE``) needs the CPU build of ``sgl_kernel``, which no package index
carries. This platform runs everything on torch operators: slow, but the real scheduler, radix cache, loader and
server, which is what a test of cache behaviour needs.
"""

from __future__ import annotations

import os

PLATFORM_NAME = "agentserve_cpu"


def selected() -> bool:
    """Whether this process was told to run on our platform; never guessed, a GPU machine must not fall to CPU."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Entry point: the platform class's qualified name if this platform was asked for, else None."""
    if not selected():
        return None
    from agentserve.runtime import torchvision_operators

    torchvision_operators.declare()
    return "agentserve.runtime.sglang_cpu_platform_class:TorchCpuPlatform"
