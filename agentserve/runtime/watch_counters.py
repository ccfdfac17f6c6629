"""What became of prompt tokens, at ``/metrics``: ``agentserve_prompt_tokens_total``."""

from __future__ import annotations

from agentserve.watch.fates import Fates


class WatchCounters:
    """Prometheus counters of one scheduler process. Create it in the scheduler only, as ``PolicyCounters`` says."""

    def __init__(self) -> None:
        from prometheus_client import Counter

        self._tokens = Counter(
            "agentserve_prompt_tokens",
            "Prompt tokens by what became of them when their prefill began: hit, in_flight (another request was still "
            "computing them), lost (computed before and no longer in the cache), new.",
            ["fate"],
        )
        self._requests = Counter("agentserve_prompts", "Prompts whose prefill began.")
        for fate in Fates._fields:  # there from the start
            self._tokens.labels(fate)

    def began(self, fates: Fates) -> None:
        self._requests.inc()
        for fate, tokens in fates._asdict().items():
            if tokens:
                self._tokens.labels(fate).inc(tokens)
