"""What a server says of itself, as far as it decides which path can run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentserve.runtime.server_facts import ARCHITECTURE, MSA_INSTALLED, Device
from agentserve.shapes.linears import local_heads
from agentserve.shapes.model import M3Sizes

NOT_REPORTED = "an environment variable, which this server does not tell: launch it with agentserve, or pass --recipe"


@dataclass(frozen=True, slots=True)
class Facts:
    """One server.

    Attributes:
        info: SGLang's ``/server_info``: its arguments as resolved, and what ``server_facts`` added.
        config: the checkpoint's parsed ``config.json``; None where it is not known.
        sizes: the same, as far as shapes depend on it.
        environment: variables the server was started with; None where that is not known.
        device: None: a GPU of unknown make (SGLang calls ROCm's cuda too).
    """

    info: Mapping[str, Any]
    config: Mapping[str, Any] | None
    sizes: M3Sizes | None
    environment: Mapping[str, str] | None
    device: Device | None

    def arg(self, name: str, default: Any = None) -> Any:
        value = self.info.get(name)
        return default if value is None else value

    @property
    def architecture(self) -> str | None:
        """``cpu``, or the GPU's: ``sm_90``, ``gfx950``; None where the server does not tell."""
        architecture: str | None = self.info.get(ARCHITECTURE)
        return architecture

    @property
    def msa_installed(self) -> bool | None:
        installed: bool | None = self.info.get(MSA_INSTALLED)
        return installed

    @property
    def tp(self) -> int:
        return int(self.arg("tp_size", 1))

    @property
    def page_size(self) -> int:
        return int(self.arg("page_size", 1))

    @property
    def topk_blocks(self) -> int | None:
        """Blocks that a query chooses."""
        config = self.config or {}
        sparse = (config.get("text_config") or config).get("sparse_attention_config") or {}
        topk: int | None = sparse.get("sparse_topk_blocks")
        return topk

    @property
    def kv_heads(self) -> int | None:
        """KV heads on each rank."""
        return None if self.sizes is None else local_heads(self.sizes, self.tp).kv

    @property
    def heads_text(self) -> str:
        """How KV heads fall on the ranks, for conditions."""
        if self.sizes is None:
            return "KV heads unknown, pass --recipe"
        return f"{self.sizes.num_key_value_heads} KV heads over tp {self.tp}: {self.kv_heads} a rank"

    def switch(self, name: str, default: bool) -> bool | None:
        """A boolean variable as SGLang reads it; None where the environment is not known."""
        if self.environment is None:
            return None
        value = self.environment.get(name)
        return default if value is None else value.lower() in ("1", "true", "yes", "y")

    def variable(self, name: str) -> str | None:
        """A variable's text; empty where it is not set, None where the environment is not known."""
        return None if self.environment is None else self.environment.get(name, "")
