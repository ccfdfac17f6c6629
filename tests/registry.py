"""What agentserve registers in a process that runs SGLang, by environment: all cases in one process, forked after the
imports, since a registry is one a process and importing SGLang takes longer than all the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PROGRAM = """
import json, os, sys
from agentserve.runtime import torchvision_operators
torchvision_operators.declare()
from agentserve.runtime import sglang_plugin
from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.plugins.hook_registry import HookRegistry
for environment in json.loads(sys.argv[1]):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.environ.update(environment)
        sglang_plugin.register()
        print(json.dumps([sorted(HookRegistry._hooks), registered_radix_cache_backends()]), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"register failed with {environment}")
"""


class Registered(NamedTuple):
    hooks: list[str]  # their targets
    backends: list[str]  # of the radix cache


def registered(environments: Sequence[Mapping[str, str]]) -> list[Registered]:
    """What is registered in each environment; variables of agentserve and SGLang in ours are left out."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AGENTSERVE_", "SGLANG_"))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(list(environments))],
        capture_output=True, text=True, timeout=900, env=kept,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()[-len(environments) :]
    return [Registered(*json.loads(line)) for line in lines]
