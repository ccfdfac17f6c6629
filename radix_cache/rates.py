"""Hit tokens and hit rates: the one place where a prefix length becomes a number in a report.

Definitions (``docs/definitions.md``):

- Rate = sum(hit tokens) / sum(prompt tokens), over prompt tokens only. It is *not* the mean of per-request
  rates, which weighs short prompts as much as long ones and is usually 1-4 points lower.
- At most ``prompt - 1`` tokens of a prompt hit: the last one is always computed, its logits are needed.
- Only whole pages hit.
- *Theoretical* means an infinite cache with instant insertion.
"""

from __future__ import annotations

from dataclasses import dataclass


def hit_tokens(common_prefix: int, prompt_tokens: int, page_size: int) -> int:
    """Tokens of a prompt that a cache of whole pages serves, given the longest common prefix it holds.

    Args:
        common_prefix: longest common prefix with what is cached, in tokens, at page size 1.
        prompt_tokens: length of the prompt (>= 1).
        page_size: tokens per page (>= 1).
    """
    if prompt_tokens < 1 or page_size < 1 or common_prefix < 0:
        raise ValueError(f"need prompt >= 1, page >= 1, prefix >= 0; got {prompt_tokens}, {page_size}, {common_prefix}")
    return min(common_prefix, prompt_tokens - 1) // page_size * page_size


@dataclass(slots=True)
class HitRate:
    """Sums from which a rate is formed; add requests, then read ``rate``."""

    hit_tokens: int = 0
    prompt_tokens: int = 0
    requests: int = 0

    def add(self, hit: int, prompt: int) -> None:
        if not 0 <= hit <= prompt:
            raise ValueError(f"hit tokens must be within 0..{prompt}, got {hit}")
        self.hit_tokens += hit
        self.prompt_tokens += prompt
        self.requests += 1

    @property
    def rate(self) -> float:
        """Fraction of prompt tokens that hit, 0..1; 0 when nothing was added."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
