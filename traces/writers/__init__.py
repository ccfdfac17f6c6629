"""Writers of trace formats, one file each; importing this package registers them all."""

from __future__ import annotations

from traces.writers import bailian, csv_lengths, mooncake, mooncake_sessions, tracelab, weka, weka_rows
from traces.writers.base import Written, write_trace, writer_names

__all__ = [
    "Written",
    "bailian",
    "csv_lengths",
    "mooncake",
    "mooncake_sessions",
    "tracelab",
    "weka",
    "weka_rows",
    "write_trace",
    "writer_names",
]
