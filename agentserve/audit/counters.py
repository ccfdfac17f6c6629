"""Counters that prove execution: their names, in one place, and how to read them from ``/metrics``.

SGLang's are of 0.5.23 (``srt/observability/metrics_collector.py``); ours are registered in
``agentserve/runtime/*_counters.py``. ``tests/test_audit.py`` fails when one of them is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self

# Prometheus adds _total to the name of a counter; agentserve/runtime states the names without it.
SELECTIONS_REUSED = "agentserve_index_selections_reused_total"
PRODUCERS_SKIPPED = "agentserve_index_producers_skipped_total"
ATTENTION_PASSES = "agentserve_sparse_attention_passes_total"
QUICK_REDUCE_PASSES = "agentserve_quick_reduce_passes_total"
OFFLOAD_TOKENS = "agentserve_offload_tokens_total"
OFFLOAD_ONLINE = "agentserve_offload_online"
SPECULATION = "agentserve_speculation"
SPECULATION_STEPS = "agentserve_speculation_steps_total"
SPECULATION_ACCEPTED = "agentserve_speculation_accepted_drafts_total"

CACHED_TOKENS = "sglang:cached_tokens_total"
GRAPH_PASSES = "sglang:cuda_graph_passes_total"
VERIFY_CALLS = "sglang:spec_verify_calls_total"
HOST_BACKUP_TOKENS = "sglang:hicache_backup_tokens_total"
HOST_LOAD_TOKENS = "sglang:load_back_tokens_total"
KV_MEMORY_GB = "sglang:kv_cache_memory_usage_gb"  # GiB of one rank
KV_TOKENS = "sglang:max_total_num_tokens"
PAGE_SIZE = "sglang:page_size"

_RANK_LABELS = ("tp_rank", "rank")


class Sample(NamedTuple):
    """One line of ``/metrics``."""

    name: str
    labels: tuple[tuple[str, str], ...]  # sorted by name
    value: float


class Metrics:
    """Samples of one scrape, or what was counted between two."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = {(sample.name, sample.labels): sample.value for sample in samples}

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the Prometheus text format. Raises ValueError where it is none."""
        from prometheus_client.parser import text_string_to_metric_families

        return cls(
            Sample(sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        )

    def since(self, earlier: Metrics) -> Metrics:
        """Counters less what they were in an earlier scrape of the same server; gauges as they are now.

        A counter that fell belongs to a server that was restarted in between: it is kept whole.
        """
        samples = []
        for (name, labels), value in self._samples.items():
            before = earlier._samples.get((name, labels), 0.0) if name.endswith("_total") else 0.0
            samples.append(Sample(name, labels, value - before if value >= before else value))
        return Metrics(samples)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over all samples of a name that carry these labels; None where there are none.

        Tensor-parallel ranks do the same work and count it each for themselves: one of them is read.
        """
        values = []
        for (sample, pairs), value in self._samples.items():
            found = dict(pairs)
            other_rank = any(found.get(label, "0") != "0" for label in _RANK_LABELS)
            if sample == name and not other_rank and labels.items() <= found.items():
                values.append(value)
        return sum(values) if values else None

    def count(self, name: str, **labels: str) -> float:
        """``total`` of a counter, 0 where it is absent: a labelled counter appears with its first event."""
        return self.total(name, **labels) or 0.0

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample of a name; empty where there is none."""
        return next((dict(pairs) for sample, pairs in self._samples if sample == name), {})
