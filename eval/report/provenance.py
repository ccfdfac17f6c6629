"""Where a report's numbers come from, in words: run settings, data set, and notes on doubtful input. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

from eval.report.schema import DataSet, PageSize, RunInfo
from traces.replay.record import RequestRecord, RunHeader


def run_info(header: RunHeader) -> RunInfo:
    """The settings and the server, as the header recorded them."""
    server = header.server
    return RunInfo(
        run_id=header.run_id,
        started=datetime.fromtimestamp(header.started_unix, UTC).isoformat(timespec="seconds"),
        agentserve_version=header.agentserve_version,
        client=server.client,
        base_url=server.base_url,
        engine_version=server.engine_version,
        model=server.model,
        kv_capacity_tokens=server.kv_capacity_tokens,
        concurrency=header.concurrency,
        think=header.think,
        history=header.history,
        prefix_sharing=header.prefix_sharing,
        over_limit=header.over_limit,
        seed=header.seed,
    )


def data_set(header: RunHeader) -> DataSet:
    """What was replayed: trace, format, filter, reduction, size and digest."""
    limits = {key: value for key, value in header.filter.items() if value is not None}
    if header.tokens_per_block == header.recorded_block_size:
        reduction = f"none ({header.recorded_block_size} tokens per block)"
    else:
        reduction = f"{header.recorded_block_size} recorded tokens a block sent as {header.tokens_per_block}"
    words = ", ".join(f"{key} {value}" for key, value in limits.items()) or "none"
    return DataSet(
        trace=header.trace,
        format=header.trace_format,
        sha256=header.trace_sha256,
        filter=limits,
        tokens_per_block=header.tokens_per_block,
        recorded_block_size=header.recorded_block_size,
        reduction=reduction,
        sessions=header.sessions,
        requests=header.requests,
        line=(
            f"{header.trace} ({header.trace_format}); filter: {words}; reduction: {reduction}; "
            f"{header.sessions:,} sessions, {header.requests:,} requests; sha256 {header.trace_sha256[:12]}"
        ),
    )


def doubts(header: RunHeader, completed: Sequence[RequestRecord], page: PageSize) -> list[str]:
    """What a reader of the numbers must know: assumed page size, other token counts, impossible prefixes."""
    notes = []
    if page.source == "assumed":
        notes.append(
            "The server did not report its page size; page 1 is assumed, so page alignment is 0. Set it with --page."
        )
    server_page = header.server.page_size
    if page.source == "option" and server_page not in (None, page.tokens):
        notes.append(
            f"The theory is for page size {page.tokens}, but the server ran with {server_page}: the steps "
            "below 'theoretical' compare two different caches."
        )
    counted = [r for r in completed if r.prompt_tokens_reported not in (None, r.prompt_tokens)]
    if counted:
        built = sum(r.prompt_tokens for r in counted)
        reported = sum(r.prompt_tokens_reported or 0 for r in counted)
        notes.append(
            f"{len(counted):,} prompts were counted differently by the server ({reported:,} tokens) than "
            f"built ({built:,}). Rates are over the built length, so theory and realized compare roughly."
        )
    disordered = [r for r in completed if not _ordered(r)]
    if disordered:
        r = disordered[0]
        notes.append(
            f"{len(disordered):,} records break an order that the definitions guarantee (prompts only <= "
            f"with answers, session <= shared, ready <= shared), first: session {r.session}, flow {r.flow}, "
            f"turn {r.turn}. They are kept; their steps may be negative."
        )
    return notes


def _ordered(r: RequestRecord) -> bool:
    chains = (
        (r.session_lcp, r.session_output_lcp, r.shared_output_lcp),
        (r.session_lcp, r.shared_lcp, r.shared_output_lcp),
        (r.ready_lcp, r.shared_output_lcp),
    )
    return all(a <= b for chain in chains for a, b in pairwise(chain))
