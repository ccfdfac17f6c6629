"""What our policies rely on in the installed SGLang: targets, signatures, and that nothing is touched unasked."""

from __future__ import annotations

import inspect

import pytest

from agentserve.runtime import torchvision_operators

torchvision_operators.declare()

from agentserve.runtime import sglang_plugin  # noqa: E402
from tests.registry import Registered  # noqa: E402
from tests.test_sglang_hooks import parameters, target_of  # noqa: E402

_CACHE = "sglang.srt.mem_cache"
_CORE = f"{_CACHE}.unified_cache.unified_tree_core.UnifiedTreeCore"
_FULL = f"{_CACHE}.unified_cache.components.full.FullComponent"
_UNIFIED = f"{_CACHE}.unified_radix_cache.UnifiedRadixCache"


@pytest.mark.parametrize(
    ("target", "names"),
    [
        ("sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill", ["self", "running_batch"]),
        ("sglang.srt.managers.scheduler.Scheduler.close_session", ["self", "recv_req"]),
        ("sglang.srt.managers.scheduler.Scheduler.update_running_batch", ["self", "batch"]),
        (f"{_CACHE}.registry.register_radix_cache_backend", ["name", "factory"]),
        (f"{_CACHE}.registry.create_unified_radix_cache", ["ctx", "cache_class"]),
        (f"{_CACHE}.unified_cache.tree_core_registry.register_tree_core_backend", ["name", "factory"]),
        (f"{_UNIFIED}.__init__", ["self", "params"]),
        (f"{_UNIFIED}.match_prefix", ["self", "params"]),
        (f"{_UNIFIED}.checkpoint_into_tree", ["self", "req", "up_to", "kwargs"]),
        (f"{_UNIFIED}.on_release", ["self", "req", "checkpointed"]),
        (f"{_UNIFIED}.evict_for_alloc", ["self", "params", "allocation_reclaim_satisfied"]),
        (f"{_CORE}.__init__", ["self", "params", "components"]),
        (f"{_CORE}.reset", ["self"]),
        (f"{_CORE}._new_node", ["self", "priority"]),
        (
            f"{_CORE}._add_new_node",
            ["self", "parent", "key", "value", "priority", "session_id", "rotation_base"],
        ),
        (f"{_CORE}._split_node", ["self", "key", "child", "split_len"]),
        (f"{_FULL}._evict_device_start", ["self", "request_cnt"]),
        (
            f"{_FULL}._evict_device_next_node",
            ["self", "tracker", "device_frees", "host_frees", "cache_actions"],
        ),
        (f"{_FULL}._evict_device_end", ["self"]),
    ],
)
def test_what_we_override_or_call_is_still_there(target: str, names: list[str]) -> None:
    assert [name for name, _ in parameters(target_of(target))] == names


@pytest.mark.parametrize("journal", ["", "somewhere"])
def test_every_policy_hook_resolves_and_says_why(journal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTSERVE_JOURNAL", journal)
    assert len(sglang_plugin.policy_hooks()) == (3 if journal else 2)
    for hook in sglang_plugin.policy_hooks():
        assert callable(target_of(hook.target))
        assert hook.kind == "around"
        assert len(hook.reason) > 20


def test_sglang_still_builds_nodes_and_leaves_as_we_replace_them() -> None:
    core = target_of(f"{_CORE}.reset")
    assert "self.evictable_device_leaves: set[UnifiedTreeNode] = set()" in inspect.getsource(core)
    assert "UnifiedTreeNode(self.component_types" in inspect.getsource(target_of(f"{_CORE}._new_node"))


def test_a_prefill_batch_still_says_what_starts_in_it() -> None:
    plan = target_of("sglang.srt.managers.schedule_batch.NextBatchPlan")
    assert {"batch_to_run", "running_batch"} <= set(plan.__annotations__)
    batch = inspect.getsource(target_of("sglang.srt.managers.schedule_batch.Req"))
    assert "self.prefix_len" in batch or "def prefix_len" in batch
    assert "self.extend_end" in batch


def test_nothing_is_registered_unless_a_policy_was_asked_for(registered_by: dict[str, Registered]) -> None:
    assert registered_by["nothing"] == ([], [])
    hooks, backends = registered_by["policy"]
    assert hooks == [
        "sglang.srt.managers.scheduler.Scheduler.close_session",
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer",
    ]
    assert backends == ["agentserve"]
