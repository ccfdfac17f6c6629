"""Our policies live in SGLang: a radix cache backend and hooks on the scheduler.

Nothing here is registered unless a policy was asked for (``policy_settings``). Checked against sglang 0.5.23;
``policy_hooks`` lists what is touched and why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from agentserve.runtime.policy_counters import PolicyCounters
from agentserve.runtime.policy_gate import Gate
from agentserve.runtime.policy_journal import JOURNAL_VARIABLE, Journal
from agentserve.runtime.policy_sessions import STOPS, Flow, SessionTable
from agentserve.runtime.policy_settings import BACKEND, PolicySettings, live_eviction
from agentserve.runtime.request_facts import BOOK
from agentserve.runtime.sglang_policy_tree import LivePolicy, PolicyFullComponent, PolicyTreeCore
from radix_cache.admission import admission_policy
from radix_cache.features import Stop
from radix_cache.gaps import GapTable

STOP_PARAMETER = "agentserve_stop"  # in sampling_params.custom_params: tool_use or end_turn, where a client knows it
TOOL_CALL_MARKER = "<tool_call>"  # what MiniMax-M3 writes before a call (srt/function_call/minimax_m3.py)


class PolicyRadixCache(UnifiedRadixCache):
    """``UnifiedRadixCache`` that tells its nodes who uses them.

    Args:
        params: SGLang's; ``tree_core_backend`` and the full component are set by ``build``.
        settings: which policies.
    """

    settings: PolicySettings

    def __init__(self, params: Any, **kwargs: Any) -> None:
        if params.pp_size > 1:
            raise ValueError(
                "--radix-cache-backend agentserve does not run with pipeline parallelism: its ranks have no common "
                "clock; use --tp-size instead, or leave the policy out"
            )
        eviction = live_eviction(self.settings.eviction)
        self.gaps = GapTable()
        self.counters = PolicyCounters(eviction.name, enabled=params.enable_metrics)
        # All ranks of a tensor-parallel group see the same: the first one writes it down.
        self.journal = Journal(os.environ.get(JOURNAL_VARIABLE) if _is_first_rank(params) else None)
        self._live = LivePolicy(eviction, self.gaps, self.counters, self.settings.truncate, self.journal)
        self.table = SessionTable(self.gaps, params.page_size)
        self.gate = Gate(admission_policy(self.settings.admission), self.table, params.token_to_kv_pool_allocator.size)
        self._reported = 0
        super().__init__(params, **kwargs)

    def tick(self, now: float | None = None) -> None:
        """Set the clock, in seconds; it never runs backwards. On several ranks all take the first one's."""
        if now is None:
            now = time.monotonic()
            if self.tp_world_size > 1:
                shared = torch.tensor([now], dtype=torch.float64)
                torch.distributed.broadcast(
                    shared, torch.distributed.get_global_rank(self.tp_group, 0), group=self.tp_group
                )
                now = float(shared[0])
        self.tree_core.now = max(self.tree_core.now, now)
        self.tree_core.score_some()

    def flow_of(self, req: Any) -> Flow:
        """The conversation of a request; asked for the first time, the request arrives now."""
        flow: Flow | None = getattr(req, "agentserve_flow", None)
        if flow is None:
            salt = repr((req.extra_key, req.cache_salt)) if req.extra_key or req.cache_salt else ""
            flow = self.table.arrive(req.rid, req.origin_input_ids, req.session_id, self.tree_core.now, salt=salt)
            req.agentserve_flow = flow
            self.journal.note("arrive", flow.id, self.tree_core.now)
            self.tree_core.note_state(flow)
        return flow

    def note_prefill(self, batch: Iterable[Any]) -> None:
        """The requests of a prefill batch have memory for a chunk; they begin now, or go on with a further one."""
        for req in batch:
            flow, now = self.flow_of(req), self.tree_core.now
            if not getattr(req, "agentserve_started", False):
                req.agentserve_started = True
                self.journal.note("start", flow.id, now, req.prefix_len)
            self.journal.note("prefill", flow.id, now, req.extend_end)

    def note_decode(self, batch: Iterable[Any]) -> None:
        """The requests of a decode batch have memory for a token more."""
        for req in batch:
            self.journal.note("decode", self.flow_of(req).id, self.tree_core.now)

    def match_prefix(self, params: Any) -> Any:
        result = super().match_prefix(params)
        req = params.req
        if req is not None and not self.disable:
            flow = self.flow_of(req)
            self.journal.note("match", flow.id, self.tree_core.now, len(params.key))
            if not getattr(req, "agentserve_matched", False):
                # A waiting request is matched at every step; only the first time is a use.
                req.agentserve_matched = True
                self.tree_core.note_match(flow, result.last_device_node)
        return result

    def checkpoint_into_tree(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if self.disable:
            return
        flow = self.flow_of(req)
        self.journal.note("finish" if req.finished() else "keep", flow.id, self.tree_core.now, up_to)
        if req.finished():
            self.table.finish(
                flow, req.rid, stop_of(req), len(req.origin_input_ids) + len(req.output_ids), self.tree_core.now
            )
        if req.last_node is not None:
            self.tree_core.note_path(flow, req.last_node)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        if not checkpointed and not self.disable:
            self.journal.note("release", self.flow_of(req).id, self.tree_core.now)

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:
        # SGLang lets this walk run until the allocator is satisfied and checks after each victim; a cut needs to
        # know how much is missing.
        self.components[ComponentType.FULL].wanted = params.num_tokens
        return super().evict_for_alloc(params, **kwargs)

    def end_session(self, name: str) -> bool:
        """A client says that a session, or one flow of it, is over. False when it is not known."""
        changed = self.table.end(name)
        for flow in changed:
            self.journal.note("end", flow.id, self.tree_core.now)
            self.tree_core.note_state(flow)
        return bool(changed)

    def admit(self, waiting: list[Any]) -> list[bool]:
        """For each waiting request, in order: may it be prefilled now?"""
        decision = self.gate.decide([(req.rid, self.flow_of(req)) for req in waiting], self.tree_core.now)
        for req, passed in zip(waiting, decision.passed, strict=True):
            BOOK.admission(req.rid, passed, self.tree_core.now)
        for flow in decision.changed:
            self.tree_core.note_state(flow)
        self.counters.queue(decision.sessions_waiting, decision.sessions_parked, len(self.table))
        learned = self.table.learned + self.tree_core.shared_learned
        self.counters.learned(learned - self._reported)
        self._reported = learned
        return decision.passed


def _is_first_rank(params: Any) -> bool:
    group = params.tp_cache_group
    return group is None or int(torch.distributed.get_rank(group)) == 0


def stop_of(req: Any) -> Stop:
    """Why a finished request's conversation waits now: what the client said, else what the answer shows."""
    said = (req.sampling_params.custom_params or {}).get(STOP_PARAMETER)
    if said is not None:
        return STOPS.get(str(said), Stop.UNKNOWN)
    if req.finished_reason is None or req.finished_reason.to_json().get("type") != "stop":
        return Stop.UNKNOWN
    text = req.tokenizer.decode(list(req.output_ids)) if req.tokenizer is not None else ""
    return Stop.TOOL if TOOL_CALL_MARKER in text else Stop.TURN


def build(settings: PolicySettings, context: Any) -> Any:
    """Factory of the backend: SGLang's own construction, with our tree core, full component and cache class."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from agentserve.runtime import sglang_plugin

    sglang_plugin.require_applied(sglang_plugin.policy_hooks())
    params = context.params
    params.tree_core_backend = BACKEND
    params.component_registry_override = {
        **(params.component_registry_override or {}),
        ComponentType.FULL: PolicyFullComponent,
    }
    return create_unified_radix_cache(context, cache_class=cache_class(settings, context))


def cache_class(settings: PolicySettings, context: Any = None) -> Callable[[Any], PolicyRadixCache]:
    """SGLang makes the cache from its parameters alone: settings are the class's, what LMCache needs is bound."""
    from agentserve.runtime import sglang_plugin

    if context is None or not sglang_plugin.offloading():
        return type("PolicyRadixCache", (PolicyRadixCache,), {"settings": settings})
    from agentserve.runtime.sglang_lmcache_policy import PolicyOffloadCache

    made = type("PolicyOffloadCache", (PolicyOffloadCache,), {"settings": settings})
    return partial(
        made,
        model_config=context.model_config,
        tp_size=context.tp_size,
        tp_rank=context.tp_rank,
        lmcache_config_file=None,  # configured by environment
        forward_stream=context.tp_worker.model_runner.forward_stream,
    )


def register_backend(settings: PolicySettings) -> None:
    """Make the backend and its tree core known to SGLang in this process."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend

    if BACKEND in registered_radix_cache_backends():
        return
    register_radix_cache_backend(BACKEND, lambda context: build(settings, context))
    register_tree_core_backend(BACKEND, build_tree_core)


def build_tree_core(params: Any, components: Any) -> PolicyTreeCore:
    # SGLang hands the factory no cache, but each component has it.
    cache: PolicyRadixCache = components[ComponentType.FULL].cache
    return PolicyTreeCore(params, components, cache._live)


def prefill_of_admitted(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """AROUND ``Scheduler.get_new_batch_prefill``: set the cache's clock; held requests stay out of sight."""
    cache = scheduler.tree_cache
    if not isinstance(cache, PolicyRadixCache):
        return original(scheduler, running_batch)
    cache.tick()
    queue = list(scheduler.waiting_queue)
    passed = cache.admit(queue)
    held = [req for req, may in zip(queue, passed, strict=True) if not may]
    if held:
        scheduler.waiting_queue = [req for req, may in zip(queue, passed, strict=True) if may]
    try:
        plan = original(scheduler, running_batch)
    finally:
        if held:
            # In order of arrival again; what came back meanwhile (preempted requests) goes last, as SGLang puts it.
            place = {req.rid: i for i, req in enumerate(queue)}
            scheduler.waiting_queue = sorted(
                [*held, *scheduler.waiting_queue], key=lambda req: place.get(req.rid, len(queue))
            )
    cache.note_prefill(() if plan.batch_to_run is None else plan.batch_to_run.reqs)
    return plan


def journal_decode(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """AROUND ``Scheduler.update_running_batch``: note whose tokens a decode step made room for."""
    decoded = original(scheduler, batch)
    cache = scheduler.tree_cache
    if isinstance(cache, PolicyRadixCache) and decoded is not None:
        cache.note_decode(decoded.reqs)
    return decoded


def close_known_session(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """AROUND ``Scheduler.close_session``: ``POST /close_session`` also ends a conversation of ours."""
    cache = scheduler.tree_cache
    if (
        isinstance(cache, PolicyRadixCache)
        and cache.end_session(recv_req.session_id)
        and recv_req.session_id not in scheduler.session_controller
    ):
        return None
    return original(scheduler, recv_req)
