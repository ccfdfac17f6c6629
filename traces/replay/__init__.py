"""Replay a trace against a live server and keep a record of every request.

``traces.replay.run`` replays; what this module exports reads runs and needs no HTTP client.
"""

from traces.replay.store import Run, RunError, read_run

__all__ = ["Run", "RunError", "read_run"]
