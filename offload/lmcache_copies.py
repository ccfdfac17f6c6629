"""Whether LMCache's compiled CUDA copies can be used with the torch that is installed.

LMCache 0.5.6's wheels are built for torch 2.13 and do not load with 2.11, say. LMCache then says so in its log and
copies with torch's operations, which take the address of its staging buffer, in GPU memory, for one in host memory
(``_normalize_lmcache_objects`` in ``lmcache/v1/platform/torch_ops/mp_mem_kernels.py``) and do not wait for the stream
of its kernels: on an H200 with torch 2.11 nothing that came back was what had been stored.
"""

from __future__ import annotations

import subprocess
import sys

LMCACHE_VERSION = "0.5.6"  # whose connector the runtime subclasses
_IMPORT = "import torch; print(torch.__version__, flush=True); import lmcache.cuda_ops"
BUILD_COMMAND = (
    "pip install ninja setuptools_scm grpcio-tools==1.78.0 && "
    f"pip install --no-build-isolation --no-deps --no-binary lmcache --force-reinstall lmcache=={LMCACHE_VERSION}"
)


def cuda_copies_problem(timeout_s: float = 120.0) -> str | None:
    """Why ``lmcache.cuda_ops`` cannot be used by this Python; None where it can.

    It is imported in a process of its own: an extension that was built for another torch may end its process.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"importing them took more than {timeout_s:.0f} s"
    if done.returncode == 0:
        return None
    torch = done.stdout.strip() or "no torch"
    reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}"
    return f"with torch {torch}: {reason}"
