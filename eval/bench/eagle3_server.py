"""One server of the EAGLE3 benchmark: M3's layers beside a draft of its size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape
from agentserve.runtime.speculation import SpeculationSettings
from eval.bench.gpu_server import REAL, GpuServer

# The published draft is one Llama layer beside M3's own embedding size and vocabulary; its head counts are assumed.
REAL_DRAFT = TinyDraftShape(REAL, num_heads=64, num_kv_heads=8, mlp_size=12_288, vocab_size=REAL.vocab_size)
_COUNTER = re.compile(r"^agentserve_speculation_(steps|accepted_drafts)_total\{([^}]*)\} (\S+)$", re.MULTILINE)


def draft_options(draft: Path, drafts: int, *, cpu: bool) -> list[str]:
    """SGLang's options for a linear chain of ``drafts`` tokens by the model in ``draft``."""
    return [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(drafts + 1),
        "--speculative-draft-attention-backend", "torch_native" if cpu else "triton",
    ]  # fmt: skip


class SpecServer(GpuServer):
    """A starting or running server.

    Args:
        folder: for its configs and log.
        settings: how it drafts; None: not at all.
        drafts: per verification step.
        batches: batch sizes that CUDA graphs are captured for.
        shape: of the target; one with ``REAL``'s hidden size and vocabulary gets ``REAL_DRAFT``.
        cpu: on this project's CPU platform, to try the benchmark itself.
        environment: more variables.
        graphs: whether decode runs in CUDA graphs.
        ranks: GPUs to share the models.
        overlap: whether the scheduler prepares a step while the one before it runs.
    """

    def __init__(
        self, folder: Path, settings: SpeculationSettings | None, *, drafts: int, batches: tuple[int, ...],
        shape: TinyM3Shape, cpu: bool, environment: Mapping[str, str], graphs: bool = True, ranks: int = 1,
        overlap: bool = True,
    ) -> None:  # fmt: skip
        draft = TinyDraftShape(shape) if cpu else REAL_DRAFT
        for name, config in (("target", shape.hf_config(bos_id=0, eos_id=1)), ("draft", draft.hf_config())):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config))
        options = ["--max-running-requests", str(max(batches))]
        if cpu:
            options += ["--max-total-tokens", "32768"]
        else:
            options += ["--mem-fraction-static", "0.8", "--max-total-tokens", "262144"]
            options += ["--cuda-graph-bs-decode", *map(str, batches)] if graphs else ["--disable-cuda-graph"]
        options += [] if overlap else ["--disable-overlap-schedule"]
        if settings is not None:
            options += draft_options(folder / "draft", drafts, cpu=cpu)
            environment = {**environment, **settings._replace(layers=draft.capture_layers).environment()}
        name = "plain" if settings is None else "EAGLE3"
        super().__init__(folder, folder / "target", options, environment, cpu=cpu, ranks=ranks, name=name)

    def counters(self) -> dict[str, float]:
        """What agentserve counted, by name and labels."""
        found = _COUNTER.findall(self.metrics())
        return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}
