#!/usr/bin/env bash
# Runs a module of this repository on a machine that has torch and a GPU but no SGLang and no network:
#   bash eval/bench/gpu_run.sh MODULE [ARGUMENTS]
# .gpu/ (ignored by git) holds deps.tar.xz and sglang.tar.xz, the Python packages that such a machine lacks. For offload,
# lmcache-src.tar.xz holds lmcache-src/ with setup.py, setup_extensions, csrc and requirements of LMCache's source archive:
# its wheel is built for another torch (offload/lmcache_copies.py). With 16 cores compiling takes some minutes.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
unpacked=${GPU_UNPACKED:-$(mktemp -d)}
for archive in "$root"/.gpu/*.tar.xz; do
  [ -e "$archive" ] || { echo "no archives in $root/.gpu: put deps.tar.xz and sglang.tar.xz there" >&2; exit 2; }
  [ -e "$unpacked/$(basename "$archive" .tar.xz)" ] || tar xJf "$archive" -C "$unpacked"
done
# Entry points are found in *.dist-info folders on the path. Ours comes from pyproject.toml; the benchmark has its own.
python3 - "$root" "$unpacked/entry" <<'PYTHON'
import sys, tomllib
from pathlib import Path

root, folder = map(Path, sys.argv[1:])
project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
groups = {f'[{g}]': [f"{k} = {v}" for k, v in names.items()] for g, names in project["entry-points"].items()}
bench = {"[sglang.srt.plugins]": ["agentserve_bench = eval.bench.index_reuse_weights:register"]}
for name, entries in ((project["name"], groups), ("agentserve-bench", bench)):
    info = folder / f"{name.replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {project['version']}\n")
    (info / "entry_points.txt").write_text("\n".join(line for g, lines in entries.items() for line in (g, *lines)) + "\n")
PYTHON
export PYTHONPATH="$root:$unpacked/entry:$unpacked/sglang:$unpacked/deps${PYTHONPATH:+:$PYTHONPATH}"
# The Rust core was built for another torch and crashes.
export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python
if [[ $1 == *offload* && -d $unpacked/lmcache-src && ! -e $unpacked/lmcache-src/built ]]; then
  (cd "$unpacked/lmcache-src" && PATH=$unpacked/deps/bin:$PATH BUILD_WITH_CUDA=1 TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0} \
    python3 setup.py --quiet build_ext --build-lib "$unpacked/deps" >build.log 2>&1 && touch built) ||
    { tail -n 20 "$unpacked/lmcache-src/build.log" >&2; exit 2; }
fi
cd "$root"
exec python3 -m "$@"
