"""EAGLE3 inside SGLang's processes: what is counted, what the radix tree is keyed by, and how M3 verifies a chain.

The functions behind ``eagle3_hooks``, on any device; a CPU needs the kernels and the attention beside this file too.
Checked against sglang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentserve.runtime.speculation import SpeculationSettings, settings_from
from agentserve.runtime.speculation_counters import SpeculationCounters

_counters: SpeculationCounters | None = None  # of this scheduler process


def _settings() -> SpeculationSettings:
    settings = settings_from()
    if settings is None:
        raise RuntimeError("an EAGLE3 hook runs in a process that was not started with --eagle3")
    return settings


def cache_by_tokens(original: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``create_tree_cache``, which all caches come from: plain token keys, and the counters of this scheduler.

    SGLang keys an EAGLE tree by pairs of a token and its successor, since the draft's KV at a position depends on the
    successor. A prefix of whole pages then always lacks the pair across its end and hits one page less. The target's
    KV does not depend on the successor, and drafts are verified, so a token key is right for what is written; at most
    the draft's last cached position is the one of another continuation.
    """
    global _counters
    from sglang.srt.runtime_context import get_spec

    from agentserve.runtime import sglang_plugin

    sglang_plugin.require_applied()
    settings = _settings()
    params = context.params
    if settings.keys == "token":
        params.is_eagle = False
    _counters = SpeculationCounters(
        settings, get_spec().speculative_num_steps or 0, enabled=params.enable_metrics and _reports()
    )
    return original(context, *args, **kwargs)


def _reports() -> bool:
    """Whether this rank counts: all ranks accept the same drafts."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_tp_rank == 0)


def count_accepted(original: Callable[..., Any], self: Any, result: Any, batch: Any) -> Any:
    """AROUND ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``: the batch's accepted drafts, by request."""
    # As upstream: what ended or was retracted since the step was started is not settled.
    counts = [not (req.is_retracted or req.finished()) for req in batch.reqs]
    tokens = original(self, result, batch)
    if _counters is not None:
        _counters.verified(
            drafts for drafts, mine in zip(result.num_correct_drafts_per_req_cpu, counts, strict=True) if mine
        )
    return tokens


def verify_as_rows(result: Any, self: Any, runner: Any) -> None:
    """AFTER ``MiniMaxSparseAttnBackend.__init__``: verify a chain as one decode row a token.

    Upstream does so on ROCm only; elsewhere a verification reads extend lengths that are never set and stops. The path
    is the device-independent decode, with every row one token longer than the one before.
    """
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    if spec.speculative_algorithm is not None and not self.is_npu:
        if spec.speculative_eagle_topk != 1:
            raise ValueError(
                "MiniMax-M3 verifies a linear chain of drafts only: set --speculative-eagle-topk 1, "
                f"got {spec.speculative_eagle_topk}"
            )
        self.is_hip = True


def capture_layers(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """BEFORE ``configure_aux_hidden_state_capture``: the layers that the launch named, never SGLang's guess."""
    layers = _settings().layers
    if not layers or not kwargs.get("eagle_use_aux_hidden_state"):
        return None
    return args, {**kwargs, "eagle_aux_hidden_state_layer_ids": list(layers)}
