"""What the GPU benchmark of index reuse puts into SGLang's processes: random weights whose tokens mean something.

SGLang's own dummy weights give all tensors of one shape the same numbers, within 0.001: head and embedding are equal,
every token repeats itself, and greedy outputs prove nothing. A plugin of its own (entry point ``agentserve_bench``,
written by ``gpu_run.sh``), because the product has no business with random weights.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch

GATE_VARIABLE = "AGENTSERVE_BENCH_GATE"  # a file; a process of the model waits until it exists
FUSE_VARIABLE = "AGENTSERVE_BENCH_FUSE"  # "1": q, k, v and index projections as one product, as a checkpoint loads
# "1": SGLang's Triton kernels take the first configuration that runs. They are timed in each process otherwise, and two
# servers that pick different block sizes round differently, whatever else is equal.
FIRST_VARIABLE = "AGENTSERVE_BENCH_FIRST_CONFIGURATION"
STD = 0.02  # initializer_range of the published config
# Gemma norms multiply by 1 + weight. With q and k 1.5 times their unit size a query attends to about 14 of its 2,048
# keys instead of 750, so that which blocks it got matters.
QK_NORM = 0.5


def register() -> None:
    """Called by SGLang early in each of its processes."""
    gate = os.environ.get(GATE_VARIABLE)
    if gate and multiprocessing.parent_process() is not None:
        # Everything is imported by now; the GPU belongs to the server before this one until the file is there.
        while not Path(gate).exists():
            time.sleep(0.05)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_loader.weight_utils.initialize_dummy_weights", fill, HookType.REPLACE)
    if os.environ.get(FIRST_VARIABLE) == "1":
        _take_first_configurations()


def _take_first_configurations() -> None:
    """Every configuration that runs takes the same time, and of equal ones Triton (3.6) takes the first."""
    from triton.runtime.autotuner import Autotuner

    timed = Autotuner._bench

    def untimed(self: Any, *args: Any, **kwargs: Any) -> list[float]:
        return [seconds if seconds == float("inf") else 1.0 for seconds in timed(self, *args, **kwargs)]

    Autotuner._bench = untimed


@torch.no_grad()
def fill(model: torch.nn.Module, *_: Any, **__: Any) -> None:
    """Normal weights seeded by name: the same in every mode, whatever other tensors a mode has or lacks."""
    for name, tensor in model.state_dict().items():
        if not torch.is_floating_point(tensor) or "cos_sin_cache" in name:
            continue
        if "norm" in name:
            tensor.fill_(QK_NORM if name.endswith((".q_norm.weight", ".k_norm.weight")) else 0.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            generator = torch.Generator(device=tensor.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            tensor.normal_(0.0, STD, generator=generator)
    for module in model.modules():
        refresh = getattr(module, "refresh_gemma_weight", None)  # a copy of 1 + weight, for kernels that want that
        if refresh is not None:
            refresh()
    if os.environ.get(FUSE_VARIABLE) == "1":
        from sglang.srt.models.minimax_m3 import build_minimax_fused_qkv_index

        build_minimax_fused_qkv_index(model)
