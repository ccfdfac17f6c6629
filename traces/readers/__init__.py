"""Readers of trace formats, one file each; importing this package registers them all."""

from __future__ import annotations

from traces.readers import generated, mooncake, weka
from traces.readers.base import format_names, open_trace, resolve_format

__all__ = ["format_names", "generated", "mooncake", "open_trace", "resolve_format", "weka"]
