"""What other caches would have brought to a run, by the simulator on the run's own requests."""

from eval.report.what_if.ask import Serving, what_if
from eval.report.what_if.workload import workload_of_run

__all__ = ["Serving", "what_if", "workload_of_run"]
