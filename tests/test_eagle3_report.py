"""Acceptance: what is counted, what a record carries, and what the report says of it."""

from __future__ import annotations

import random

import pytest

from agentserve.runtime.speculation import SpeculationSettings
from agentserve.runtime.speculation_counters import SpeculationCounters
from eval.report.acceptance import acceptance_by_position, acceptance_length, drafting
from eval.report.schema import ReportError
from eval.report.text import accepted
from tests.test_report_summary import header, record
from traces.replay.record import Speculation
from traces.replay.speculation import speculation_of

GAUGE = 'agentserve_speculation{keys="token",length="2.78",mode="synthetic"} 3.0\n'


@pytest.mark.parametrize("seed", range(5))
def test_length_and_positions_are_those_of_the_steps(seed: int) -> None:
    rng = random.Random(seed)
    steps = [rng.randrange(4) for _ in range(200)]
    by_drafts = [steps.count(n) for n in range(4)]
    assert acceptance_length(by_drafts) == pytest.approx(1 + sum(steps) / len(steps))
    positions = acceptance_by_position(by_drafts, 3)
    assert positions == pytest.approx([sum(n >= i for n in steps) / len(steps) for i in (1, 2, 3)])
    # a position that was never reached is still a position
    assert acceptance_by_position([7], 3) == [0, 0, 0]
    assert acceptance_length(by_drafts) == pytest.approx(1 + sum(positions))


def test_the_gauge_tells_synthetic_from_real() -> None:
    server = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3}
    wanted = Speculation(algorithm="EAGLE3", drafts=3, mode="synthetic", length=2.78, keys="token")
    assert speculation_of(server, "# HELP agentserve_speculation Drafts\n" + GAUGE) == wanted
    real = GAUGE.replace("synthetic", "real").replace("2.78", "")
    assert speculation_of(server, real) == Speculation(algorithm="EAGLE3", drafts=3, mode="real", keys="token")
    # a server that agentserve did not launch: its acceptance may be synthetic
    assert speculation_of(server, "") == Speculation(algorithm="EAGLE3", drafts=3, mode="unknown")
    assert speculation_of({"speculative_algorithm": None}, GAUGE) is None


def test_the_report_sums_over_completed_requests_and_labels_the_mode() -> None:
    made = header()
    made.server.speculation = Speculation(algorithm="EAGLE3", drafts=3, mode="synthetic", length=2.78)
    records = [
        record("a", 0, 100, lcp=0, accepted_drafts=[4, 0, 2]),
        record("a", 1, 100, lcp=0, accepted_drafts=[0, 3, 0, 1]),
        record("b", 0, 100, lcp=0),  # one token: no step
    ]
    section = drafting(made, records)
    assert section is not None
    assert (section.steps, section.requests) == (10, 2)
    assert section.length == pytest.approx(1 + (3 * 1 + 2 * 2 + 1 * 3) / 10)
    assert section.by_position == pytest.approx([0.6, 0.3, 0.1])
    assert accepted(section) == (
        "EAGLE3, 3 drafts a step, synthetic acceptance of 2.78, the text is not the model's: acceptance length 2.000 "
        "over 10 steps; by position 60.00 %, 30.00 %, 10.00 %."
    )
    assert "1 + accepted drafts / steps" in section.definition
    assert "by_drafts" not in section.definition


def test_nothing_drafted_no_section_and_no_step_no_number() -> None:
    assert drafting(header(), [record("a", 0, 100, lcp=0)]) is None
    made = header()
    made.server.speculation = Speculation(algorithm="EAGLE3", drafts=3, mode="real")
    section = drafting(made, [record("a", 0, 100, lcp=0)])
    assert section is not None
    assert section.length is None
    assert "no verification step" in accepted(section)
    with pytest.raises(ReportError, match=r"session a, flow main, turn 0, field 'accepted_drafts'"):
        drafting(made, [record("a", 0, 100, lcp=0, accepted_drafts=[-1])])


def test_counters_by_position() -> None:
    from prometheus_client import REGISTRY

    counters = SpeculationCounters(SpeculationSettings(length=2.5), 3, enabled=True)
    for batch in ([0, 3, 1], [], [2]):
        counters.verified(batch)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, labels)

    assert value("agentserve_speculation_steps_total", mode="synthetic") == 4
    found = [
        value("agentserve_speculation_accepted_drafts_total", mode="synthetic", position=str(i)) for i in (1, 2, 3)
    ]
    assert found == [3, 2, 1]
    assert value("agentserve_speculation", mode="synthetic", length="2.5", keys="token") == 3
    SpeculationCounters(SpeculationSettings(), 3, enabled=False).verified([1, 2])


def test_what_pair_keys_must_lose() -> None:
    from eval.bench.eagle3_hits import pair_key_loss

    # ends on a page: one page; inside a page: nothing; the whole prompt again: only pages below its last token count
    lost = {256: 128, 300: 0, 384: 0, 0: 0}
    for prefix, tokens in lost.items():
        assert pair_key_loss([record("a", 0, 384, lcp=prefix)], 128) == tokens
