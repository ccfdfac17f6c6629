"""Going on with a run: what must be as it was, and what is said of the rest."""

from __future__ import annotations

from traces.replay.config import ReplayConfig
from traces.replay.prepare import ReplayError, context_limit
from traces.replay.record import RunHeader, ServerInfo
from traces.replay.select import Selection
from traces.replay.store import Progress


def same_limit(header: RunHeader, config: ReplayConfig, server: ServerInfo) -> int | None:
    """The run's own context limit, which this server must still take: else other turns would be dropped."""
    limit: int | None = header.filter.get("max_context")
    takes = context_limit(config, server)
    if takes is not None and (limit is None or takes < limit):
        raise ReplayError(
            f"{config.out} was started with a context limit of {limit} tokens, this server takes {takes}; serve with "
            "the same context length and cache capacity as before, or start a new run"
        )
    return limit


def check_same(header: RunHeader, selection: Selection, config: ReplayConfig) -> None:
    """Raise ReplayError where a trace no longer gives the requests that the run was started with."""
    if header.trace_sha256 != selection.sha256:
        raise ReplayError(
            f"{config.trace} gives other requests than when {config.out} was started (digest "
            f"{selection.sha256[:12]} instead of {header.trace_sha256[:12]}): the trace has changed; restore it, or "
            "start a new run"
        )


def same_process(before: ServerInfo, now: ServerInfo) -> bool:
    """Whether it is the server that the run was started on, and not a later one at its address."""
    started = "startup_time"
    return before.base_url == now.base_url and before.args.get(started) == now.args.get(started)


def resume_message(before: Progress, server: ServerInfo) -> str:
    """What the event log says of a resumption."""
    notes = [f"{len(before.done)} records kept"]
    if before.retried:
        notes.append(f"{before.retried} requests that lost their server are sent again")
    if before.cut_lines:
        notes.append(f"{before.cut_lines} half-written last lines were cut off")
    if not same_process(before.header.server, server):
        notes.append("the server is another process, whose cache began empty: theory still counts what was sent before")
    return "; ".join(notes)
