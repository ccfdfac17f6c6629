"""Write a session as a Weka file (``traces.readers.weka``), so that generated traces are files like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from traces.model import BlockScope, Flow, Session, Turn


def write_weka(session: Session, path: str | Path) -> None:
    """Write one session as Weka JSON; reading it back gives the same session but for ``source``.

    Entries are sorted by time. Spawn and join of subagents are not written: readers infer them from the times.
    Times are kept to the microsecond, durations of subagents to the
    millisecond, since the format has them as whole milliseconds.
    """
    Path(path).write_bytes(orjson.dumps(weka_document(session), option=orjson.OPT_SERIALIZE_NUMPY))


def weka_document(session: Session) -> dict[str, Any]:
    """The session as Weka JSON, with arrays for ``hash_ids``."""
    entries = [(turn.start_s, 0, _request(turn, 0.0)) for turn in session.main.turns]
    entries += [(flow.start_s, 1, _subagent(flow)) for flow in session.subagents]
    entries.sort(key=lambda entry: entry[:2])
    return {
        "id": session.id,
        "models": sorted({turn.model for flow in session.flows() for turn in flow.turns}),
        "block_size": session.block_size,
        "hash_id_scope": "local" if session.scope is BlockScope.SESSION else "global",
        "tool_tokens": session.main.tool_tokens,
        "system_tokens": session.main.system_tokens,
        "requests": [entry for _, _, entry in entries],
    }


def _request(turn: Turn, start_s: float) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "t": round(turn.start_s - start_s, 6),
        "type": "n",
        "model": turn.model,
        "in": turn.prompt_tokens,
        "out": turn.output_tokens,
        "hash_ids": turn.block_ids,
        "stop": turn.stop.value,
    }
    if turn.think_s is not None:
        entry["think_time"] = turn.think_s
    if turn.api_s is not None:
        entry["api_time"] = turn.api_s
    return entry


def _subagent(flow: Flow) -> dict[str, Any]:
    return {
        "type": "subagent",
        "t": round(flow.start_s, 6),
        "agent_id": flow.name,
        "duration_ms": None if flow.duration_s is None else round(flow.duration_s * 1000),
        "tool_tokens": flow.tool_tokens,
        "system_tokens": flow.system_tokens,
        "requests": [_request(turn, flow.start_s) for turn in flow.turns],
    }
