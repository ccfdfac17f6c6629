"""EAGLE3 with LMCache: the draft's K and V belong to a prefix, and SGLang's refusal is lifted for a linear chain.

What is unsafe in the pair as SGLang 0.5.23 and LMCache 0.5.6 have it, and what makes it safe here:

- The connector registers the target's pool only: behind a restored prefix the draft reads whatever its slots held
  before, and next to nothing it proposes is accepted. Here the draft's pool goes with the target's.
- A draft's K and V at a position depend on the next token, so SGLang keys its tree by pairs of tokens, of which
  LMCache gets the first: keys do not name what they hold. Here the tree is keyed by tokens, in both.
- Keys name the target's path only: another draft under the same target would get the first one's K and V. Here the
  fingerprint covers the draft's weights and capture layers.

Trees of drafts move accepted tokens' K and V between slots; that is not done for M3 at all, and is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentserve.runtime.sglang_lmcache_pool import Draft, attach_draft

SOURCE = "agentserve.offload"  # of a declaration that is taken back


def without_refusal(original: Callable[..., Any], server_args: Any) -> Any:
    """AROUND ``handle_cache_compatibility``: its refusal of speculation does not see a linear EAGLE3 chain.

    All its other checks run as they are; nothing else in this function reads the algorithm.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    arguments = resolving_view(server_args)
    chain = arguments.speculative_algorithm == "EAGLE3" and arguments.speculative_eagle_topk == 1
    if not (arguments.enable_lmcache and chain):
        return original(server_args)
    declare_resolution(server_args, SOURCE, speculative_algorithm=None)
    try:
        return original(server_args)
    finally:
        declared = server_args._resolved_overrides
        declared[:] = [entry for entry in declared if entry[0] != SOURCE]


def note_draft_pool(result: Any, worker: Any) -> None:
    """AFTER ``BaseSpecWorker.init_hicache_draft_plan``, which follows the allocation of the draft's pool."""
    from sglang.srt.runtime_context import get_spec

    checkpoint = Path(get_spec().speculative_draft_model_path)
    attach_draft(worker.target_worker.model_runner.token_to_kv_pool, Draft(worker.primary_draft_kv_pool, checkpoint))
