"""One server of the index-reuse benchmark: what it runs, the pace of its answers, and what it counted."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.runtime.index_reuse import IndexReuse
from eval.bench.gpu_server import REAL, TINY, GpuServer
from eval.bench.index_reuse_weights import FIRST_VARIABLE, FUSE_VARIABLE

_COUNTER = re.compile(r'^agentserve_index_(\w+)_total\{layer="(\d+)",mode="(\w+)"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Mode:
    """What a server runs.

    Attributes:
        name: ``off``, ``shared`` (the selection only) or ``skipped`` (and no producers).
        fused: q, k, v and index projections are one product, as after loading a checkpoint. Unfused, the products
            of ``shared`` and ``skipped`` are the same ones, and so are the configurations of SGLang's kernels, so that
            their tokens must be equal bit for bit.
        separate_store: reusing layers norm and store in SGLang's two kernels instead of ours.
        timed: unfused, too, SGLang's kernels take the configuration that is fastest in their process, as in serving.
    """

    name: str
    fused: bool = True
    separate_store: bool = False
    timed: bool = False

    def __str__(self) -> str:
        return self.name + ("" if self.fused else ", unfused") + (", separate store" if self.separate_store else "")

    def environment(self, freq: int) -> dict[str, str]:
        reuse = IndexReuse(freq=freq, keep_producers=self.name == "shared", separate_store=self.separate_store)
        first = not self.fused and not self.timed
        same = {FUSE_VARIABLE: "1" if self.fused else "0", FIRST_VARIABLE: "1" if first else "0"}
        return {**same, **({} if self.name == "off" else reuse.environment())}


class BenchServer(GpuServer):
    """A starting or running server.

    Args:
        folder: for its config, gate and log.
        mode: what it runs.
        freq: group size of the sharing modes.
        cpu: the tiny shape on this project's CPU platform, to try the benchmark itself.
        shape: of the model; ``REAL``, with ``cpu`` ``TINY``, unless given.
        ranks: GPUs to share it.
    """

    def __init__(
        self, folder: Path, mode: Mode, *, freq: int, cpu: bool, shape: TinyM3Shape | None = None, ranks: int = 1
    ) -> None:
        self.mode, self._cpu = mode, cpu
        folder.mkdir(parents=True)
        shape = shape or (TINY if cpu else REAL)
        (folder / "config.json").write_text(json.dumps(shape.hf_config(bos_id=0, eos_id=1)))
        options = ["--max-total-tokens", "32768"] if cpu else [
            "--cuda-graph-bs-decode", "1", "8", "--mem-fraction-static", "0.86", "--max-total-tokens", "983040"
        ]  # fmt: skip
        options += ["--max-running-requests", "8", "--stream-interval", "4"]
        super().__init__(folder, folder, options, mode.environment(freq), cpu=cpu, ranks=ranks, name=str(mode))

    def pace(self, prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
        """Greedy generation of a batch; seconds per output token while all of it was decoding, and the tokens.

        Taken between chunks of one answer, so that neither the request's way in nor its prefill is part of it.
        """
        sampling = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        body = json.dumps({"input_ids": prompts, "sampling_params": sampling, "stream": True}).encode()
        request = urllib.request.Request(f"{self.url}/generate", body, {"Content-Type": "application/json"})
        arrivals: dict[int, list[tuple[float, int]]] = {}
        tokens: dict[int, list[int]] = {}
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                now = time.perf_counter()
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                index = chunk.get("index", 0)
                arrivals.setdefault(index, []).append((now, chunk["meta_info"]["completion_tokens"]))
                tokens[index] = chunk["output_ids"]
        return pace_of(arrivals), [tokens[index] for index in sorted(tokens)]

    def profile(self, folder: Path, steps: int) -> None:
        """Record what the device does in the next ``steps`` passes; SGLang writes ``*.json.gz`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        body = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU" if self._cpu else "GPU"]}
        self.post("/start_profile", body, timeout_s=60)

    def executed(self) -> dict[str, dict[str, dict[str, int]]]:
        """Executed counters, ``{mode: {event: {layer: passes}}}``; empty where the server has no hooks of ours."""
        for _ in range(3):  # a pass publishes what an earlier one copied from the device, at most once a second
            time.sleep(1.05)
            self.generate([[1, 2, 3]], 2)
        counts: dict[str, dict[str, dict[str, int]]] = {}
        for event, layer, mode, value in _COUNTER.findall(self.metrics()):
            counts.setdefault(mode, {}).setdefault(event, {})[layer] = int(float(value))
        return counts


def pace_of(arrivals: Mapping[int, Sequence[tuple[float, int]]]) -> float:
    """Seconds per token of the answer that began last, up to the first end of any: then all were decoding.

    Args:
        arrivals: per answer, when a chunk came (seconds) and how many tokens were out then.

    Raises:
        ValueError: the answers hardly overlap.
    """
    last_to_begin = max(arrivals.values(), key=lambda chunks: chunks[0][0])
    first_end = min(chunks[-1][0] for chunks in arrivals.values())
    # The chunks of one step come one after the other, within a fraction of a millisecond.
    shared = [chunk for chunk in last_to_begin if chunk[0] <= first_end + 0.5e-3]
    if len(shared) < 2:
        raise ValueError("the answers of the batch hardly overlap; ask for more tokens")
    (begin, before), (end, after) = shared[0], shared[-1]
    return (end - begin) / (after - before)
