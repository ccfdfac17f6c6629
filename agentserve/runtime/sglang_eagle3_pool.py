"""The draft's KV pool on a CPU."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class PlainKVPool(MHATokenToKVPool):
    """SGLang's own pool, without the warm-up of a Triton kernel that moves tokens: a chain moves none."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
