"""The snapshot in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from agentserve.watch.snapshot import FATE_TITLES, VICTIM_TITLES

_SESSIONS = 15


def render(snapshot: dict[str, Any], sessions: int = _SESSIONS) -> Group:
    """Tables of what ``agentserve.watch.snapshot`` made.

    Args:
        snapshot: as the server sends it.
        sessions: rows of sessions at most.
    """
    now, server = snapshot["now"], snapshot["server"]
    head = Text()
    head.append(f"{server.get('model', '')}  ", style="bold")
    head.append(
        f"{now['running']:.0f} running, {now['queued']:.0f} queued, "
        f"{now['kv_usage']:.0%} of {now['kv_tokens']:,.0f} KV tokens held by them, "
        f"policy {server.get('policy') or 'of SGLang'}"
    )
    return Group(head, _windows(snapshot), *_evicted(snapshot), *_sessions(snapshot, sessions), _evidence(snapshot))


def _windows(snapshot: dict[str, Any]) -> Table:
    # A server that is younger than the longer windows has the same in each of them.
    apart = {_span(window): window for window in reversed(snapshot["windows"])}
    columns = [*reversed(apart.values()), {**snapshot["since_start"], "seconds": None}]
    table = Table("prompt tokens", *(Column(_span(window), justify="right") for window in columns))
    table.add_row("hit rate", *(_share(window["hit_rate"]) for window in columns))
    table.add_row("possible without limit", *(_share(window["possible_rate"]) for window in columns))
    for fate, title in FATE_TITLES.items():
        table.add_row(f"  {title}", *(f"{window['fates'][fate]:,.0f}" for window in columns))
    for tier in snapshot["since_start"]["cached_by_tier"]:
        values = [window["cached_by_tier"][tier] for window in columns]
        if any(values):
            table.add_row(f"  cached on {tier} (ended requests)", *(f"{value:,.0f}" for value in values))
    table.add_row("evicted", *(f"{window['evicted_tokens']:,.0f}" for window in columns))
    return table


def _evicted(snapshot: dict[str, Any]) -> list[Table]:
    window = snapshot["windows"][-1]
    rows = [(VICTIM_TITLES.get(name, name), tokens) for name, tokens in window["evicted_by_victim"].items()]
    rows += [(f"offload: {name}", tokens) for name, tokens in window["offload"].items()]
    rows += [(f"offload lookups: {name}", count) for name, count in window["offload_lookups"].items()]
    if not rows:
        return []
    table = Table(f"evicted from, {_span(window)}", Column("tokens", justify="right"))
    for title, tokens in sorted(rows, key=lambda row: -row[1]):
        table.add_row(title, f"{tokens:,.0f}")
    return [table]


def _sessions(snapshot: dict[str, Any], limit: int) -> list[Table]:
    rows = [row for state in snapshot["schedulers"] for row in state["sessions"]]
    if not rows:
        return []
    counts = ", ".join(f"{count} {state}" for state, count in snapshot["session_states"].items())
    table = Table(
        "session", "state", "admission", Column("context", justify="right"), Column("idle s", justify="right"),
        Column("flows", justify="right"), title=f"{snapshot['sessions_known']:,} sessions: {counts}",
    )  # fmt: skip
    for row in rows[:limit]:
        table.add_row(
            Text(row["session"]), row["state"], row["admission"], f"{row['context']:,}", f"{row['idle_s']:,.0f}",
            f"{row['flows']}",
        )  # fmt: skip
    return [table]


def _evidence(snapshot: dict[str, Any]) -> Text:
    return Text("\n".join(snapshot["evidence"]), style="dim")


def _span(window: dict[str, Any]) -> str:
    if window["seconds"] is None:
        return "since start"
    covered = window["covered_s"]
    return f"last {covered:.0f} s" if covered < 100 else f"last {covered / 60:.0f} min"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
