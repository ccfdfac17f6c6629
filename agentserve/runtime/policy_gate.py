"""Which waiting requests may be prefilled now: the admission policy applied to a queue, without SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from agentserve.runtime.policy_sessions import Flow, Session, SessionTable
from radix_cache.admission import AdmissionPolicy
from radix_cache.features import FlowState


class Decision(NamedTuple):
    """What the gate says of one look at the queue."""

    passed: list[bool]  # for each waiting request
    changed: list[Flow]  # flows that were parked or released, to be scored again
    sessions_waiting: int  # sessions that may not start
    sessions_parked: int


class Gate:
    """Holds back new sessions and parks running ones.

    A request that was let through is not held again while it waits for memory, and a session with none (``start``)
    or no older one (``go_on``) beside it is never held.
    New sessions start in order of arrival: while one waits, none behind it starts.

    Args:
        policy: the two questions.
        table: whose sessions.
        capacity: of the cache, in tokens.
    """

    def __init__(self, policy: AdmissionPolicy, table: SessionTable, capacity: int) -> None:
        self._policy = policy
        self._table = table
        self._capacity = float(capacity)
        self._passed: set[str] = set()  # requests that were let through and still wait for memory
        self._started = 0

    def decide(self, waiting: Sequence[tuple[str, Flow]], now: float) -> Decision:
        """Ask the policy about (request, flow) pairs in order of arrival."""
        self._passed &= {request for request, _ in waiting}
        active = self._table.active(now)
        passed: list[bool] = []
        changed: list[Flow] = []
        held: dict[Session, None] = {}
        for request, flow in waiting:
            session = flow.session
            if request in self._passed:
                passed.append(True)
                continue
            if session.started and session in active:
                may = self._may_go_on(session, active)
                if session.parked is may:
                    session.parked = not may
                    changed += _set_state(session, FlowState.LIVE if may else FlowState.PARKED)
            else:
                may = not held and self._may_start(flow, active)
                if may:
                    self._started += 1
                    session.started, session.parked, session.number = True, False, self._started
                    active.append(session)
                else:
                    held[session] = None
            if may:
                self._passed.add(request)
            passed.append(may)
        parked = sum(session.parked for session in active)
        return Decision(passed, changed, len(held), parked)

    def _may_start(self, flow: Flow, active: Sequence[Session]) -> bool:
        total = sum(session.context for session in active)
        return not active or self._policy.start(float(total), float(flow.context), self._capacity)

    def _may_go_on(self, session: Session, active: Sequence[Session]) -> bool:
        older = sum(other.context for other in active if other.number < session.number)
        if active[0] is session:
            return True
        return self._policy.go_on(float(older), float(session.context), self._capacity)


def _set_state(session: Session, state: FlowState) -> list[Flow]:
    changed = [flow for flow in session.flows if flow.state not in (FlowState.ENDED, state)]
    for flow in changed:
        flow.state = state
    return changed
