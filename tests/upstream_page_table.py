"""SGLang's own table for AITER's paged attention, run by Triton's interpreter in a process of its own.

``TRITON_INTERPRET`` must be set before the kernels are imported, and changes every Triton kernel of the process.
Usage: ``python -m tests.upstream_page_table IN OUT``; IN holds the arguments of each case, OUT gets (table, lengths).
"""

from __future__ import annotations

import sys

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

import torch  # noqa: E402
from sglang.kernels.ops.attention.minimax_sparse.prefill import gluon_prefill  # noqa: E402


def main(source: str, target: str) -> None:
    answers = []
    for case in torch.load(source, weights_only=True):
        answers.append(gluon_prefill._build_gluon_sparse_bt_prefill(**case, sparse_block_size=128))
    torch.save(answers, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
