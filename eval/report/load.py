"""Reads a run directory for the report; the files' form is known to ``traces.replay.store`` alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from eval.attribution.texts import texts_of
from eval.report.schema import ReportError
from traces.replay.events import KV_EVENTS, EventError, KvEvents, read_events
from traces.replay.record import RequestRecord, RunEvent, RunHeader
from traces.replay.store import RETRIED, RunError, TurnKey, read_run


class Run(NamedTuple):
    header: RunHeader
    records: list[RequestRecord]
    events: list[RunEvent]
    kv_events: KvEvents | None
    metrics: tuple[str, str] | None  # the server's counters at start and end, in the Prometheus text format
    notes: list[str]  # what a reader of the report must know about the files
    texts: Mapping[TurnKey, str] = {}  # prompts as text, where they are known


def load_run(path: Path) -> Run:
    """Reads all of a run, finished or not.

    Raises:
        ReportError: no run there, or a faulty file (names file, line and field).
    """
    try:
        run = read_run(path)
        records = list(run.records())
        kv_events = read_events(path)
        texts = texts_of(path, run.header)
    except (RunError, EventError) as error:
        raise ReportError(str(error)) from error
    notes = []
    if run.truncated_lines:
        notes.append(f"{run.truncated_lines} last line(s) were cut off while being written, and are left out.")
    retried_file = path / RETRIED
    retried = retried_file.read_bytes().count(b"\n") if retried_file.exists() else 0
    if retried:
        notes.append(
            f"{retried:,} requests failed when the server went away and were sent again after a resume; the"
            f" failed attempts ({RETRIED}) are in no number here."
        )
    if kv_events is not None and kv_events.cut_lines:
        notes.append(f"The last line of {KV_EVENTS} was cut off while being written, and is left out.")
    return Run(run.header, records, run.events, kv_events, run.metrics(), notes, texts)
