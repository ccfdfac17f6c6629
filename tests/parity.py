"""Comparing SGLang's log-probabilities with a reference's, and which prompts may be compared."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TOLERANCE = 1e-4
MARGIN = 3e-6  # of the largest score of the same row; the two programs' scores differ by about 1e-6 of it


class ClosestChoice(TorchFunctionMode):
    """Smallest gap between the last chosen and the first rejected score of any top-k call, relative to the row."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            scores, k = args[0], args[1]
            if k < scores.shape[-1]:
                best = torch.sort(scores, dim=-1, descending=True).values
                size = scores.abs().masked_fill(~torch.isfinite(scores), 0).amax(dim=-1)
                gap = (best[..., k - 1] - best[..., k]) / size
                gap = gap[torch.isfinite(gap)]
                if gap.numel():
                    self.margin = min(self.margin, float(gap.min()))
        return func(*args, **(kwargs or {}))


def difference(entries: list[Any], logprobs: torch.Tensor, first_position: int) -> float:
    """Largest deviation of reported ``[logprob, token, _]`` entries; entry i is the token at first_position + i."""
    return max(
        (
            abs(entry[0] - logprobs[first_position + i - 1, entry[1]].item())
            for i, entry in enumerate(entries)
            if entry[0] is not None
        ),
        default=0.0,
    )
