"""The report of a replay run: ``load_run`` -> ``summarize`` -> terminal, JSON, HTML.

``summarize`` is pure and is the only place where numbers are formed; the renderers only format them. The HTML
renderer (``eval.report.html``) imports plotly and is therefore not imported here.
"""

from eval.report.latency import Slo
from eval.report.load import Run, load_run
from eval.report.schema import Report, ReportError
from eval.report.summary import summarize
from eval.report.terminal import render_terminal

__all__ = ["Report", "ReportError", "Run", "Slo", "load_run", "render_terminal", "summarize"]
