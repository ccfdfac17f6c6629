"""Norm, RoPE and KV store in one kernel, by Triton's interpreter. On a GPU: ``eval.bench.index_reuse_kernels``."""

import os
import subprocess
import sys

PROGRAM = """
import torch
from agentserve.runtime.triton_fused_store import norm_rope_store

torch.manual_seed(0)
TOKENS, Q, KV = 5, 8, 2
for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2**-7)):  # the interpreter cuts off, a GPU rounds
    qkv = torch.randn(TOKENS, (Q + 2 * KV) * 128).to(dtype)
    before = qkv.clone()
    q_weight, k_weight = torch.randn(128).to(dtype) / 8, torch.randn(128).to(dtype) / 8
    cos_sin, positions, slots = torch.randn(50, 64), torch.tensor([3, 4, 0, 49, 7]), torch.tensor([5, 9, 1, 0, 2])
    k_cache = torch.zeros(12, KV, 128, dtype=dtype)
    v_cache = torch.zeros_like(k_cache)
    q = norm_rope_store(
        qkv, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, eps=1e-6, pdl=False
    )
    heads = before.float().view(TOKENS, -1, 128)

    def expected(x, weight):
        n = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
        cos, sin = cos_sin[positions][:, None, :32], cos_sin[positions][:, None, 32:]
        first, second, rest = n[..., :32], n[..., 32:64], n[..., 64:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    for got, want in ((q.view(TOKENS, Q, 128), expected(heads[:, :Q], q_weight)),
                      (k_cache[slots], expected(heads[:, Q : Q + KV], k_weight))):
        torch.testing.assert_close(got.float(), want, rtol=tolerance, atol=tolerance)
    assert torch.equal(v_cache[slots], before.view(TOKENS, -1, 128)[:, Q + KV :])
    assert torch.equal(qkv, before)
    untouched = [slot for slot in range(12) if slot not in slots.tolist()]
    assert not k_cache[untouched].any() and not v_cache[untouched].any()
assert norm_rope_store(
    qkv[:0], q_weight, k_weight, cos_sin, positions[:0], slots[:0], k_cache, v_cache, eps=1e-6, pdl=False
).shape == (0, Q * 128)
print("right")
"""


def test_the_kernel_norms_rotates_and_stores() -> None:
    # The interpreter is chosen when Triton is imported, so in a process of its own.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}
    )
    assert done.stdout.strip().endswith("right"), done.stderr[-3000:]
