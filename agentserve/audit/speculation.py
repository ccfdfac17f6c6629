"""EAGLE3."""

from __future__ import annotations

from agentserve.audit.counters import SPECULATION, SPECULATION_ACCEPTED, SPECULATION_STEPS, VERIFY_CALLS, Metrics
from agentserve.audit.facts import Facts
from agentserve.audit.row import AuditRow


def eagle3(facts: Facts, metrics: Metrics) -> AuditRow:
    """Drafts verified by the model. Steps prove that it runs, accepted drafts that it is worth something."""
    algorithm, topk = facts.arg("speculative_algorithm"), facts.arg("speculative_eagle_topk")
    eligible: bool | None
    if algorithm is None:
        eligible, condition = False, "no draft model is loaded"
    else:
        eligible = None if topk is None else topk == 1
        condition = f"M3's sparse attention verifies a linear chain: speculative_eagle_topk is {topk}"
    ours = metrics.count(SPECULATION_STEPS)
    steps = ours or metrics.count(VERIFY_CALLS)
    counter = f"verification steps ({SPECULATION_STEPS if ours else VERIFY_CALLS}"
    if ours:
        accepted = metrics.count(SPECULATION_ACCEPTED)
        labels = metrics.labels(SPECULATION)
        kind = f"{labels.get('mode', 'real')} acceptance" + (f" of {asked}" if (asked := labels.get("length")) else "")
        counter += f"): {accepted:,.0f} drafts accepted, {1 + accepted / ours:.2f} tokens a step, {kind}"
    else:
        counter += ")"
    return AuditRow(
        "EAGLE3",
        algorithm == "EAGLE3",
        f"speculative_algorithm is {algorithm}",
        eligible,
        condition,
        steps,
        counter,
    )
