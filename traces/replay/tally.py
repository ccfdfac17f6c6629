"""Running totals of a replay, for its progress display and its closing line.

The report (``agentserve report``) computes its numbers from the records, not from here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from radix_cache.rates import HitRate, hit_tokens
from traces.replay.record import RequestRecord


@dataclass(slots=True)
class Tally:
    """Sums over the requests recorded so far.

    Attributes:
        requests_total: requests that the run has to record.
        realized: reported cached tokens over reported prompt tokens, of requests that succeeded and report it.
        theoretical: infinite cache, instant insertion, output inserted, all sessions, at the server's page size
            (1 where unknown); over the same requests.
    """

    requests_total: int
    sessions_total: int
    page_size: int = 1
    requests: int = 0
    failed: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # by RequestError.kind
    sessions_running: int = 0
    sessions_done: int = 0
    in_flight: int = 0
    realized: HitRate = field(default_factory=HitRate)
    theoretical: HitRate = field(default_factory=HitRate)

    def add(self, record: RequestRecord) -> None:
        """Count a request; its tokens only where it succeeded and the server reported cached ones."""
        self.requests += 1
        if record.error is not None:
            self.failed += 1
            self.errors[record.error.kind] += 1
            return
        if record.cached_tokens is None or record.prompt_tokens_reported is None:
            return
        reported = record.prompt_tokens_reported
        self.realized.add(min(record.cached_tokens, reported), reported)
        hit = hit_tokens(record.shared_output_lcp, record.prompt_tokens, self.page_size)
        self.theoretical.add(hit, record.prompt_tokens)
