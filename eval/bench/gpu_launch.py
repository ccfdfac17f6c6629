"""``agentserve launch`` itself on a GPU, all features at once: ``bash eval/bench/gpu_run.sh eval.bench.gpu_launch``.

The other benchmarks on a GPU start SGLang's server with weights made in place. This one takes the way of a user: a
small checkpoint with M3's head shapes and a draft, a recipe with index reuse, EAGLE3, a policy and offload,
``agentserve launch``, some prompts (computed, hit, restored after a flush), ``agentserve audit``. Prints a JSON object;
exit code 1 where an answer differs or a fast path that was asked for was not executed. ``--cpu`` does the same with the
tiny M3.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from agentserve.checkpoint.config import TinyM3Shape
from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import TinyDraftShape, write_tiny_eagle3
from agentserve.launch.host import free_ports
from eval.bench.gpu_frame import Record, options, out_file, plugin_path, prompt, python_path
from eval.bench.gpu_server import answers
from eval.bench.offload_gpu_parts import LMCACHE
from eval.bench.offload_restore import counted, difference, flush, generate

SMALL = TinyM3Shape(
    hidden_size=1024, num_heads=64, num_kv_heads=4, head_dim=128, rotary_dim=64, num_index_heads=4, index_dim=128,
    expert_size=256, dense_size=1024, topk_blocks=16, dtype="bfloat16",
)  # fmt: skip
LENGTHS = (2_561, 5_121)  # whole chunks and one token
# Paths that this launch asks for and that a GPU can take; the table has more.
ASKED = ("index reuse", "index producer skip", "radix hit", "offload store", "offload load", "EAGLE3")


def recipe(folder: Path, port: int, *, cpu: bool, ranks: int, kv_dtype: str) -> Path:
    """Write checkpoints and the recipe that uses them; the daemons' ports are those behind the server's."""
    shape = TinyM3Shape() if cpu else SMALL
    draft = TinyDraftShape(shape) if cpu else TinyDraftShape(shape, num_heads=16, num_kv_heads=8)
    fields: dict[str, Any] = {
        "model": str(write_tiny_checkpoint(folder / "m3", shape=shape)),
        "device": "cpu" if cpu else "cuda",
        "dtype": shape.dtype,
        "tp": ranks,
        "port": port,
        "page_size": 128,
        "kv": {"capacity_tokens": 32_768, "dtype": kv_dtype},
        "attention_backend": "torch_native" if cpu else "triton",
        "index_reuse": "freq:4",
        "eagle3": {"draft": str(write_tiny_eagle3(folder / "draft", shape=draft))},
        "radix": {"policy": "gittins"},
        "offload": {"backend": "lmcache", "port": port + 1, "http_port": port + 2, "memory_gb": 1.0},
    }
    if not cpu:
        fields["extra_args"] = ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", "1"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def ask(http: httpx.Client, vocabulary: int) -> list[dict[str, Any]]:
    """Each prompt computed, from the device, and restored; where its tokens came from and whether answers agree."""
    found, stored = [], 0
    for length in LENGTHS:
        ids = prompt(length, 0, vocabulary)
        given, stored = {}, stored + length - 1
        for way in ("computed", "device", "restored"):
            if way == "restored":  # a policy decides a second after the end what is worth storing
                deadline = time.monotonic() + 20
                while counted(http, "stored") < stored and time.monotonic() < deadline:
                    time.sleep(0.2)
                flush(http)
            given[way] = generate(http, ids)[1]
        metas = {way: answer["meta_info"] for way, answer in given.items()}
        found.append({
            "length": length,
            "cached": {way: [meta["cached_tokens"], meta.get("cached_tokens_details")] for way, meta in metas.items()},
            "restored": (metas["restored"].get("cached_tokens_details") or {}).get("storage", 0),
            "restored_as_device": difference([given["device"], given["restored"]]) == 0.0,
        })  # fmt: skip
    return found


def main() -> None:
    parser = options(__doc__, budget_s=200)
    parser.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), default="auto", help="of K and V")
    chosen = parser.parse_args()
    asked = ASKED if chosen.kv_dtype == "auto" else (*ASKED, "FP8 K/V")
    name = f"launch-tp{chosen.ranks}{'' if chosen.kv_dtype == 'auto' else '-fp8'}.json"
    record = Record("eval.bench.gpu_launch", out_file(name), chosen.budget, kv_dtype=chosen.kv_dtype)
    port = free_ports(1 + 2 * chosen.ranks)
    vocabulary = (TinyM3Shape() if chosen.cpu else SMALL).vocab_size
    with tempfile.TemporaryDirectory(prefix="launch-") as temporary:
        folder, log = Path(temporary), Path(temporary) / "server.log"
        path = recipe(folder, port, cpu=chosen.cpu, ranks=chosen.ranks, kv_dtype=chosen.kv_dtype)
        programs = folder / "bin"  # where nothing is installed LMCache has no script
        programs.mkdir()
        (programs / "lmcache").write_text(f"#!{sys.executable}\n{LMCACHE}\n")
        (programs / "lmcache").chmod(stat.S_IRWXU)
        weights = plugin_path(folder / "path", "eagle3_bench", "eval.bench.eagle3_weights:register")
        env = {**os.environ, "PATH": f"{os.environ['PATH']}:{programs}"}
        if not chosen.cpu:
            env["PYTHONPATH"] = python_path(weights)
        url, cli = f"http://127.0.0.1:{port}", [sys.executable, "-c", "from agentserve.cli import main; main()"]
        with (folder / "launch.log").open("wb") as out:
            launched = subprocess.Popen([*cli, "launch", str(path), "--log", str(log)], env=env, stdout=out, stderr=out)
        try:
            if not answers(f"{url}/health_generate", launched, record.left()):
                tails = [
                    file.read_text(errors="replace")[-3000:] for file in (folder / "launch.log", log) if file.exists()
                ]
                raise SystemExit("not ready:\n" + "\n---\n".join(tails))
            record.note("ready")
            with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
                record.found["prompts"] = ask(http, vocabulary)
            audited = subprocess.run(
                [*cli, "audit", url, "--json"], env=env, capture_output=True, text=True, timeout=60
            )
            if audited.returncode:
                raise SystemExit(f"the audit failed: {audited.stderr[-2000:]}")
            record.found["audit"] = json.loads(audited.stdout)
            record.note("audited")
        finally:
            launched.send_signal(signal.SIGINT)
            launched.wait(60)
            record.found["exit_code"] = launched.returncode
            record.save()
            record.show()
    rows = {row["path"]: row for row in record.found["audit"]}
    good = all(rows[path]["executed"] for path in asked)
    good = good and all(row["restored"] > 0 and row["restored_as_device"] for row in record.found["prompts"])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
