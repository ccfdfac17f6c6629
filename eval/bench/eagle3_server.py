"""One server of the EAGLE3 benchmark: real SGLang, layers of MiniMax-M3's real shapes, a draft of its size, random
weights. Standard library only beside what SGLang needs: the machine with the GPU has little else."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape
from agentserve.runtime.speculation import SpeculationSettings
from eval.bench.index_reuse_server import REAL, TINY, BenchServer, Mode
from eval.bench.index_reuse_weights import FUSE_VARIABLE, GATE_VARIABLE

# The published draft is one Llama layer beside M3's own embedding size and vocabulary; its head counts are assumed.
REAL_DRAFT = TinyDraftShape(REAL, num_heads=64, num_kv_heads=8, mlp_size=12_288, vocab_size=REAL.vocab_size)
_COUNTER = re.compile(r"^agentserve_speculation_(steps|accepted_drafts)_total\{([^}]*)\} (\S+)$", re.MULTILINE)


class SpecServer(BenchServer):
    """A starting or running server.

    Args:
        folder: for its configs and log.
        settings: how it drafts; None: not at all.
        drafts: per verification step.
        batches: batch sizes that CUDA graphs are captured for.
        cpu: the tiny shapes on this project's CPU platform, to try the benchmark itself.
        environment: more variables.
        graphs: whether decode runs in CUDA graphs.
        ranks: GPUs to share the models.
    """

    def __init__(
        self, folder: Path, settings: SpeculationSettings | None, *, drafts: int, batches: tuple[int, ...], cpu: bool,
        environment: dict[str, str], graphs: bool = True, ranks: int = 1,
    ) -> None:  # fmt: skip
        self.mode = Mode("EAGLE3" if settings else "plain")
        target: TinyM3Shape = TINY if cpu else REAL
        draft = TinyDraftShape(TINY) if cpu else REAL_DRAFT
        for name, config in (("target", target.hf_config(bos_id=0, eos_id=1)), ("draft", draft.hf_config())):
            (folder / name).mkdir(parents=True)
            (folder / name / "config.json").write_text(json.dumps(config))
        self.gate, self._log = folder / "gate", folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        backend = "torch_native" if cpu else "triton"
        argv = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder / "target"),
            "--load-format", "dummy", "--page-size", "128", "--chunked-prefill-size", "8192",
            "--max-running-requests", str(max(batches)), "--port", str(port), "--skip-tokenizer-init",
            "--skip-server-warmup", "--enable-metrics", "--attention-backend", backend,
        ]  # fmt: skip
        if cpu:
            argv += ["--device", "cpu", "--dtype", "float32", "--sleep-on-idle", "--max-total-tokens", "32768"]
        else:
            argv += ["--dtype", "bfloat16", "--cuda-graph-backend-prefill", "disabled", "--context-length", "131072",
                     "--mem-fraction-static", "0.8", "--max-total-tokens", "262144"]  # fmt: skip
            argv += ["--cuda-graph-bs-decode", *map(str, batches)] if graphs else ["--disable-cuda-graph"]
        if ranks > 1:
            argv += ["--tp-size", str(ranks), "--disable-custom-all-reduce"]
        if settings is not None:
            argv += [
                "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder / "draft"),
                "--speculative-num-steps", str(drafts), "--speculative-eagle-topk", "1",
                "--speculative-num-draft-tokens", str(drafts + 1), "--speculative-draft-attention-backend", backend,
            ]  # fmt: skip
            environment = environment | settings._replace(layers=draft.capture_layers).environment()
        if cpu:
            environment |= {"SGLANG_PLATFORM": "agentserve_cpu", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
        environment |= {FUSE_VARIABLE: "1", GATE_VARIABLE: str(self.gate)}
        self._process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=self._log.open("wb"), stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def counters(self) -> dict[str, float]:
        """What agentserve counted, by name and labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        return {f"{name}{{{labels}}}": float(value) for name, labels, value in _COUNTER.findall(text)}
