"""The platform class itself, apart from its entry point so that asking for it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Torch operators only: no Triton, no graphs, no compiled kernels."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        # The name is upstream's, because other code keys on it; sglang_plugin points it at our backend.
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def is_pin_memory_available(self, device: object = None) -> bool:
        return False

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "EAGLE3"

    def get_speculative_cache_locs_fn(self) -> Callable[..., Any]:
        from agentserve.runtime.sglang_eagle3_kernels import extend_cache_locs

        return extend_cache_locs

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from agentserve.runtime.sglang_eagle3_pool import PlainKVPool

        return PlainKVPool

    # Without these two POST /start_profile ends the server.
    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        # SGLang logs a hook that could not be applied and goes on; without these the model is silently wrong.
        from agentserve.runtime.sglang_plugin import require_applied

        require_applied()
