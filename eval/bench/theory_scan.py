"""Theoretical hit rate of a whole trace in one streaming pass, with its time and peak memory.

Sessions count one after the other: sharing between sessions (scope ``tools+system``) does not depend on their
order but for who comes first. Definitions are those of ``docs/definitions.md``.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from radix_cache.rates import HitRate, hit_tokens
from radix_cache.theory import PrefixLengths, PromptShape, SessionScan, SharedPrefixes
from traces.model import BlockScope, Session, Turn

Scope = Literal["session", "tools+system"]


@dataclass(slots=True)
class TheoryResult:
    """What a pass over a trace found.

    Attributes:
        rates: page size -> sums and rate.
        mean_of_rates: page size -> mean of per-request rates, which is another number.
        global_ids: ids were comparable across sessions, so whole blocks were shared and outputs did not count.
        seconds: wall-clock time of the pass, reading included.
        cpu_seconds: processor time of the same, which other processes do not inflate.
        peak_rss_bytes: largest resident size of this process so far.
    """

    scope: Scope
    output_inserted: bool
    rates: dict[int, HitRate]
    mean_of_rates: dict[int, float] = field(default_factory=dict)
    sessions: int = 0
    global_ids: bool = False
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0


def scan_trace(
    sessions: Iterable[Session], *, page_sizes: Sequence[int], scope: Scope, output_inserted: bool
) -> TheoryResult:
    """Rates over all requests of all sessions; holds one session at a time.

    Args:
        sessions: consumed once.
        page_sizes: tokens per page, each >= 1.
        scope: whether sessions share the tools + system head; without effect where ids are global.
        output_inserted: whether generated tokens can be hit.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    result = TheoryResult(scope, output_inserted, {page: HitRate() for page in page_sizes})
    shares = dict.fromkeys(page_sizes, 0.0)
    by_scope = {kind: SharedPrefixes(global_ids=kind is BlockScope.GLOBAL) for kind in BlockScope}
    for session in sessions:
        result.sessions += 1
        result.global_ids |= session.scope is BlockScope.GLOBAL
        for turn, lengths in prefix_lengths(session, by_scope[session.scope]):
            length = _choose(lengths, session.scope, scope, output_inserted)
            for page, rate in result.rates.items():
                hit = hit_tokens(length, turn.prompt_tokens, page)
                rate.add(hit, turn.prompt_tokens)
                shares[page] += hit / turn.prompt_tokens
    for page, rate in result.rates.items():
        result.mean_of_rates[page] = shares[page] / rate.requests if rate.requests else 0.0
    result.seconds = time.perf_counter() - started
    result.cpu_seconds = time.process_time() - cpu_started
    result.peak_rss_bytes = peak_rss_bytes()
    return result


def prefix_lengths(session: Session, shared: SharedPrefixes) -> Iterator[tuple[Turn, PrefixLengths]]:
    """Prefix lengths of a session's turns in recorded order of arrival."""
    scan = SessionScan(session.block_size, shared)
    for flow, turn in session.turns_in_arrival_order():
        head = (flow.tool_tokens, flow.system_tokens)
        yield turn, scan.add(PromptShape(turn.block_ids, turn.prompt_tokens, turn.output_tokens, head))


def _choose(lengths: PrefixLengths, ids: BlockScope, scope: Scope, output_inserted: bool) -> int:
    if ids is BlockScope.GLOBAL or scope == "tools+system":
        return lengths.shared_output if output_inserted else lengths.shared
    return lengths.session_output if output_inserted else lengths.session


def peak_rss_bytes() -> int:
    """Largest resident size of this process so far; the kernel counts KiB on Linux and bytes on macOS."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
