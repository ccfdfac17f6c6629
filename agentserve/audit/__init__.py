"""Configured, eligible, executed: which fast paths of a running server really run. Pure; see docs/design/audit.md."""

from agentserve.audit.counters import Metrics
from agentserve.audit.row import AuditRow
from agentserve.audit.rows import audit_rows

__all__ = ["AuditRow", "Metrics", "audit_rows"]
