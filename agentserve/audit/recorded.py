"""The audit of a run that was recorded: the server is gone, its arguments and counters are on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentserve.audit.counters import Metrics
from agentserve.audit.rows import audit_rows
from agentserve.launch.facts import known_config
from agentserve.shapes.model import ShapeError
from eval.report.schema import AuditLine
from offload.state import StateError


def audit_of_run(args: Mapping[str, Any], metrics: tuple[str, str] | None) -> list[AuditLine]:
    """Fast paths during a run.

    Args:
        args: the server's arguments, as the run's header has them.
        metrics: its counters at the start and at the end of the run, in the Prometheus text format.

    Returns:
        A line a path; empty where there are no counters, or where the model is not an M3, whose paths these are.
    """
    if metrics is None:
        return []
    try:
        start, end = (Metrics.from_text(text) for text in metrics)
        rows = audit_rows(args, end.since(start), config=known_config(str(args.get("model_path", ""))))
    except (ValueError, ShapeError, StateError):
        return []
    return [AuditLine.model_validate(row.as_dict()) for row in rows]
