"""What the offload benchmarks conclude from what they counted, without servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eval.bench.eagle3_server import REAL_DRAFT
from eval.bench.gpu_server import REAL, free_ports
from eval.bench.offload_gain import conclude, rates
from eval.bench.offload_gpu import good, where
from eval.bench.offload_gpu_parts import CHUNK, state_bytes
from eval.bench.offload_rig import crawl, descriptors, frozen, segments
from eval.bench.offload_soak import answers, growth, judge, together, waits
from eval.bench.offload_soak import good as soaked
from traces.replay.record import RequestError, RequestRecord


def record(turn: int, answer: str, *, seconds: float = 1.0, storage: int = 0, failed: bool = False) -> RequestRecord:
    return RequestRecord(
        session="s", flow="main", turn=turn, ready_s=0, sent_s=1, first_token_s=1.5, done_s=1 + seconds, think_s=0,
        prompt_tokens=1000, prompt_tokens_reported=1000, output_tokens_wanted=4, output_tokens=4, output_sha256=answer,
        cached_tokens=256 + storage, cached_storage=storage, session_lcp=0, session_output_lcp=0, shared_lcp=0,
        shared_output_lcp=600, ready_lcp=0, error=RequestError(kind="http", message="500") if failed else None,
    )  # fmt: skip


def test_a_wrong_and_a_failed_request_are_each_seen() -> None:
    known = answers([record(0, "a"), record(1, "b"), record(2, "c")])
    passes = [[record(0, "a"), record(1, "x", seconds=9)], [record(2, "c", failed=True), record(0, "a", storage=512)]]
    found = judge(passes, known)
    assert (found["requests"], found["wrong_answers"], found["failed_requests"]) == (4, 1, 1)
    assert found["slowest_request_s"] == 9
    assert found["from_host_tier"] == 0.128


def test_waits_over_their_deadline_and_a_second_are_counted_in_the_servers_own_histogram() -> None:
    registering = """
from agentserve.runtime.offload_counters import OffloadCounters
from prometheus_client import generate_latest
counters = OffloadCounters(0, enabled=True, deadlines=(2.0, 5.0))
for wait, seconds in (("lookup", 0.02), ("lookup", 2.9), ("lookup", 3.2), ("load", 0.2), ("store", 5.9)):
    counters.took(wait, seconds)
print(generate_latest().decode())
"""
    text = subprocess.run([sys.executable, "-c", registering], capture_output=True, text=True, check=True).stdout
    found = waits(text, {"lookup": 2.0, "load": 2.0, "store": 5.0})
    assert found["lookup"]["count"] == 3
    assert [found[name]["over_deadline_and_1_s"] for name in found] == [1, 0, 0]
    assert [found[name]["none_longer_than_s"] for name in found] == [5.0, 0.25, 6.0]
    assert abs(found["lookup"]["seconds"] - 6.12) < 1e-6


def soak_of(**changed: Any) -> dict[str, Any]:
    return {
        "minutes": 5.0,
        "faults": {"daemon slow": 2},
        "with_faults": {"requests": 100, "failed_requests": 0, "wrong_answers": changed.get("wrong", 0)},
        "waits": {name: {"over_deadline_and_1_s": changed.get(name, 0.0)} for name in ("lookup", "load", "store")},
        "growth": {"read_locked_count": changed.get("locks", 0), "segments": -1},
    }


def test_one_bad_seed_makes_a_soak_bad() -> None:
    fine = together({"1": soak_of(), "2": soak_of()})
    assert (fine["minutes"], fine["requests"], fine["faults"]) == (10.0, 200, {"daemon slow": 4})
    assert soaked(fine)
    for one in ("wrong", "lookup", "load", "store", "locks"):
        assert not soaked(together({"1": soak_of(), "2": soak_of(**{one: 1})})), one


def test_growth_is_by_process_and_by_kind() -> None:
    before = {"descriptors": {1: 10, 2: 20}, "segments": 12, "locks": {"sessions": 0, "read_locked_count": 1}}
    after = {"descriptors": {1: 9, 2: 23}, "segments": 12, "locks": {"sessions": 2, "read_locked_count": 0}}
    assert growth(before, after) == {
        "descriptors": 3, "processes": 0, "segments": 0, "sessions": 2, "read_locked_count": -1,
    }  # fmt: skip


def test_rates_tell_the_device_from_the_host_tier() -> None:
    found = rates([record(0, "a", storage=512), record(1, "b")])
    assert (found["hit_rate"], found["from_device"], found["from_host_tier"]) == (0.512, 0.256, 0.256)
    assert found["never_evicting_hit_rate"] == 0.512  # four whole pages of the 600 tokens seen before


def replays(**changed: Any) -> dict[str, Any]:
    """Two replays of one trace, with a host tier that brings 20 of the 30 points that eviction has lost."""
    common = {"capacity": 0.5, "never_evicting_hit_rate": 0.8, "answers": {"s/main/0": "a"}, "offload_tokens": {}}
    runs = {
        "without": {**common, "host_tier": False, "hit_rate": 0.5},
        "with": {**common, "host_tier": True, "hit_rate": 0.7} | changed,
    }
    return {"runs": runs, "prefix_of_8000": {"restored_equals_device_bit_for_bit": True}}


def test_a_gain_counts_only_with_equal_answers_and_nothing_refused() -> None:
    result = replays()
    assert conclude(result)
    assert result["gain"] == {
        "0.5": {"points_of_hit_rate": 20.0, "recomputed_tokens_less": 0.4, "of_what_eviction_lost": 0.6667}
    }
    assert not conclude(replays(answers={"s/main/0": "b"}))
    assert not conclude(replays(answers={"s/main/0": "a", "s/main/1": "a"}))
    assert not conclude(replays(offload_tokens={"refused": 128}))


def cells(**changed: Any) -> dict[str, Any]:
    cell = {
        "tokens_refused": 0, "tokens_verified": 512, "tokens_restored": 512,
        "largest_logprob_difference_restored_device": 0.0,
        "cached_tokens": {"restored": [json.dumps({"device": 0, "storage": 512})]},
    }  # fmt: skip
    restart = [{"tokens": {"device": 0, "storage": 512}, "largest_logprob_difference": 0.0}]
    return {"lengths": {str(2 * CHUNK + 1): cell | changed}, "after_engine_restart": restart}


def test_a_gpu_result_is_good_only_with_everything_restored_verified_and_equal() -> None:
    assert good(cells())
    assert not good({})
    assert not good(cells(tokens_refused=128))
    assert not good(cells(tokens_verified=0))
    assert not good(cells(largest_logprob_difference_restored_device=1e-6))
    assert not good(cells(cached_tokens={"restored": [json.dumps({"device": 512, "storage": 0})]}))
    assert not good(cells() | {"after_engine_restart": []})
    assert where({"meta_info": {"cached_tokens": 7}}) == {"device": 7, "storage": 0}


def test_the_state_of_the_real_shapes_is_k_v_index_k_and_a_drafts_k_and_v() -> None:
    config, draft = REAL.hf_config(bos_id=0, eos_id=1), REAL_DRAFT.hf_config()
    assert state_bytes(config, None, 1, "bfloat16") == 2 * (6 * 2 * 4 * 128 + 5 * 128)
    assert state_bytes(config, None, 2, "bfloat16") == 2 * (6 * 2 * 2 * 128 + 5 * 128)
    assert state_bytes(config, draft, 2, "bfloat16") == 2 * (6 * 2 * 2 * 128 + 5 * 128 + 2 * 4 * 128)
    assert len(set(free_ports(4))) == 4


def test_freezing_and_slowing_leave_a_process_running() -> None:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        running: Any = SimpleNamespace(pid=process.pid)
        with frozen(running):
            time.sleep(0.1)
            assert _state(process.pid) == "T"
        crawl(running, 0.3, stop_s=0.1, run_s=0.01)
        assert _state(process.pid) in "RSD"  # D: it waits for a disk page, and goes on
        assert descriptors({process.pid})[process.pid] >= 3
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert descriptors({process.pid}) == {}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_segments_of_dead_processes_count(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for pid in (process.pid, os.getpid(), os.getppid()):
        (tmp_path / f"lmcache_kv_{pid}_0").touch()
    assert segments({os.getpid()}, tmp_path) == 2
