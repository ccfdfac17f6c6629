"""All fast paths of one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from agentserve.audit import cache, kernels, sharing, speculation
from agentserve.audit.counters import Metrics
from agentserve.audit.facts import Facts
from agentserve.audit.row import AuditRow
from agentserve.runtime.server_facts import CONFIG, Device, device_told, environment_told
from agentserve.shapes.model import read_sizes

# One function a path; a new path is one function and one line.
PATHS: tuple[Callable[[Facts, Metrics], AuditRow], ...] = (
    sharing.index_reuse,
    sharing.producer_skip,
    kernels.msa_kernel,
    kernels.aiter_sparse_attention,
    kernels.decode_graph,
    kernels.prefill_graph,
    kernels.quantized_all_reduce,
    cache.radix_hit,
    cache.offload_store,
    cache.offload_load,
    cache.fp8_cache,
    speculation.eagle3,
)


def audit_rows(
    info: Mapping[str, Any],
    metrics: Metrics,
    *,
    config: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    device: Device | None = None,
) -> list[AuditRow]:
    """Audit a server. What it tells of itself is believed before what the caller says.

    Args:
        info: its ``/server_info``, or what a run's header kept of it.
        metrics: its ``/metrics``, or what it counted during a run: ``after.since(before)``.
        config: the checkpoint's parsed ``config.json``; None leaves open what hangs on its sizes.
        environment: variables it was started with (``LaunchPlan.env``); None leaves open what they configure.
        device: where it runs; None: as SGLang says, which knows a CPU but not ROCm from CUDA.

    Raises:
        ShapeError, StateError: the config is not that of an M3.
    """
    config = info.get(CONFIG, config)
    told = environment_told(info)
    device = device_told(info) or device or ("cpu" if info.get("device") == "cpu" else None)
    facts = Facts(
        info,
        config,
        None if config is None else read_sizes(config),
        environment if told is None else told,
        device,
    )
    return [path(facts, metrics) for path in PATHS]
