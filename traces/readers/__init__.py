"""Readers of trace formats, one file each; importing this package registers them all."""

from __future__ import annotations

from traces.readers import (
    aiperf_dag,
    bailian,
    claude_code,
    codex,
    csv_lengths,
    generated,
    mooncake,
    mooncake_sessions,
    openai_chat,
    tracelab,
    weka,
    weka_rows,
)
from traces.readers.base import format_names, open_trace, resolve_format

__all__ = [
    "aiperf_dag",
    "bailian",
    "claude_code",
    "codex",
    "csv_lengths",
    "format_names",
    "generated",
    "mooncake",
    "mooncake_sessions",
    "open_trace",
    "openai_chat",
    "resolve_format",
    "tracelab",
    "weka",
    "weka_rows",
]
