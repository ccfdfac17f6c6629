"""Multi-turn coding traces: one typed model, readers, reductions, a generator and token-exact prompts."""

from __future__ import annotations

from traces.model import BlockScope, Flow, ReadStats, Session, StopReason, TraceError, Turn
from traces.readers import format_names, open_trace

__all__ = [
    "BlockScope",
    "Flow",
    "ReadStats",
    "Session",
    "StopReason",
    "TraceError",
    "Turn",
    "format_names",
    "open_trace",
]
