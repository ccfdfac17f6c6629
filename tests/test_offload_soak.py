"""What the soak with drafts and a policy concludes from what the server counted, without a server."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from eval.bench.offload_gain import computed_though_found
from eval.bench.offload_soak import at_work, policy_counts
from tests.test_offload_bench import record
from traces.replay.record import OffloadAnswer, RequestRecord


def test_what_a_policy_left_out_and_evicted_is_read_from_the_servers_own_counters() -> None:
    registering = """
from agentserve.runtime.offload_counters import OffloadCounters
from agentserve.runtime.policy_counters import PolicyCounters
from prometheus_client import generate_latest
counters = OffloadCounters(0, enabled=True, deadlines=(2.0,))
counters.not_stored("ended", 256)
counters.not_stored("ended", 256)
policy = PolicyCounters("gittins", enabled=True)
policy.evicted("parked", 128, cut=False)
policy.evicted("ended", 384, cut=True)
print(generate_latest().decode())
"""
    text = subprocess.run([sys.executable, "-c", registering], capture_output=True, text=True, check=True).stdout
    assert policy_counts(text) == {"not_stored": {"ended": 512}, "evicted": {"parked": 128, "ended": 384}}
    assert policy_counts("") == {}


def run_of(verifications: int, evicted: int) -> dict[str, Any]:
    return {"with_faults": {"verifications_of_drafts": verifications}, "policy": {"evicted": {"parked": evicted}}}


def test_a_feature_that_was_never_at_work_is_seen() -> None:
    both = {"eagle3": True, "policy": "gittins"}
    assert at_work(both, {"1": run_of(9, 128)})
    assert not at_work(both, {"1": run_of(9, 128), "2": run_of(0, 128)})
    assert not at_work(both, {"1": run_of(9, 0)})
    assert at_work({}, {"1": {"with_faults": {"verifications_of_drafts": 0}, "policy": {}}})


def test_what_the_tier_had_and_was_computed_is_counted_by_what_became_of_the_load() -> None:
    def heard(found: int, load: Any, storage: int) -> RequestRecord:
        answer = OffloadAnswer(lookup="hit", found=found, load=load)
        return record(0, "a", storage=storage).model_copy(update={"offload": answer})

    records = [heard(768, "restored", 512), heard(768, None, 0), heard(512, None, 0), heard(512, "late", 0)]
    assert computed_though_found([*records, record(1, "b")]) == {"not loaded": 768, "late": 256}
