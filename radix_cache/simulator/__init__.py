"""What a cache policy would do to a trace: closed-loop sessions on a radix tree, a few seconds for a whole trace."""

from radix_cache.simulator.outcome import Outcome
from radix_cache.simulator.run import Service, Setting, simulate
from radix_cache.simulator.workload import FlowSpec, TurnSpec, Workload, WorkloadBuilder

__all__ = ["FlowSpec", "Outcome", "Service", "Setting", "TurnSpec", "Workload", "WorkloadBuilder", "simulate"]
