"""An offload tier and admission in the attribution: what a request heard, the facts on their way, LMCache's events."""

from __future__ import annotations

import inspect
import pkgutil
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from agentserve.runtime import sglang_plugin, torchvision_operators
from agentserve.runtime.request_facts import BOOK, KEY, FactBook, note_load, note_lookup
from eval.attribution.live import attribute_with_events
from eval.report.attribution import attribution
from radix_cache.attribution import CacheKind, Cause, EvictedBy, Loss, Sweep, TierAnswer, VictimState
from radix_cache.attribution.pages import as_ranges
from tests.test_attribution import PAGE, asked, serve
from tests.test_attribution_live import _header
from tests.test_report_summary import header, record
from traces.replay.clients.base import FACTS, Outcome
from traces.replay.clients.sglang import _take_chunk
from traces.replay.events import EventBatch, KvEvents, RequestPages
from traces.replay.record import OffloadAnswer

torchvision_operators.declare()  # before anything of SGLang is imported

STORAGE = 4


@pytest.mark.parametrize(
    ("answer", "causes"),
    [
        (None, [(Cause.NOT_RESTORED, 4, 8)]),
        (TierAnswer("late"), [(Cause.RESTORED_LATE, 4, 8)]),
        (TierAnswer("offline"), [(Cause.OFFLOAD_REFUSED, 4, 8)]),
        (TierAnswer("miss"), [(Cause.OFFLOAD_LOST, 4, 8)]),
        (TierAnswer("hit", 8), [(Cause.NOT_RESTORED, 4, 4), (Cause.OFFLOAD_LOST, 8, 4)]),
        (TierAnswer("hit", 12, 8, "late"), [(Cause.RESTORED_LATE, 4, 4), (Cause.OFFLOAD_REFUSED, 8, 4)]),
        (TierAnswer("hit", 12, None, "refused"), [(Cause.OFFLOAD_REFUSED, 4, 8)]),
        (TierAnswer("hit", 12, None, "failed"), [(Cause.OFFLOAD_REFUSED, 4, 8)]),
    ],
)
def test_what_a_request_heard_names_the_cause(answer: TierAnswer | None, causes: list[tuple[Cause, int, int]]) -> None:
    """Four pages, two of them also stored in the tier below; all but the first leave the device."""
    sweep = Sweep([asked(0, (0, 4), opens=True), asked(0, (0, 4))])
    serve(sweep, 0)
    sweep.store(as_ranges([(1, 2)]), STORAGE)
    sweep.evict(as_ranges([(1, 3)]))
    sweep.arrive(1)
    sweep.look_up(1, PAGE, 4 * PAGE, PAGE, answer)
    found = sweep.losses(1)
    assert [(one.cause, one.at, one.tokens) for one in found[:-1]] == causes
    # the last page was never stored below: it is evicted from the device, whatever the tier said
    assert (found[-1].cause, found[-1].at, found[-1].tokens) == (Cause.EVICTED, 12, PAGE)


def test_evicted_while_admission_held_the_request() -> None:
    """The first page goes before request 1 is sent, the second while it is held."""
    sweep = Sweep([asked(0, (0, 2), opens=True), asked(0, (0, 2)), asked(1, (10, 2), opens=True)])
    serve(sweep, 0)
    sweep.arrive(2)
    sweep.look_up(2, 0, 0, PAGE)
    sweep.evict(as_ranges([(1, 1)]), 2)
    sweep.arrive(1)
    sweep.evict(as_ranges([(0, 1)]), 2)
    sweep.hold(1)
    sweep.look_up(1, 0, 2 * PAGE, PAGE)
    assert [(one.cause, one.at, one.culprit, one.victim) for one in sweep.losses(1)] == [
        (Cause.HELD, 0, 2, VictimState.RUNNING),
        (Cause.EVICTED, PAGE, 2, VictimState.TOOL_WAIT),
    ]


def test_a_live_run_with_restored_tokens() -> None:
    """Turn 1 finds page 0 on the device, page 1 in storage, and a page less than was stored there."""
    stored = as_ranges([(0, 4)]).tolist()
    first = record("s", 0, 17, 0, cached_tokens=0, sent_s=0.0, first_token_s=2.0, done_s=3.0)
    second = record(
        "s", 1, 17, 16, cached_tokens=8, cached_device=4, cached_storage=4, sent_s=6.0, first_token_s=8.0, done_s=9.0,
        offload=OffloadAnswer(lookup="hit", found=8, load="restored"),
    )  # fmt: skip
    pages = tuple((a, b) for a, b in stored)
    paths = {
        ("s", "main", turn): RequestPages(session="s", flow="main", turn=turn, prompt=pages, answer=())
        for turn in (0, 1)
    }
    told: list[tuple[float, tuple[Any, ...]]] = [
        (1.0, (("store", 1, ((0, 4),)),)),
        (3.5, (("store", STORAGE, ((0, 3),)),)),
        (4.0, (("remove", 1, ((1, 3),)),)),
        (7.5, (("store", 1, ((1, 3),)),)),
    ]
    batches = [EventBatch(seq=i, ts=at, at=at, ops=ops) for i, (at, ops) in enumerate(told)]
    events = KvEvents(_header(), batches, paths)
    (one,) = attribute_with_events([first, second], [second], events, CacheKind(PAGE))
    assert one.losses == (
        Loss(Cause.OFFLOAD_LOST, 4, 8),
        Loss(Cause.EVICTED, 4, 12, EvictedBy.GROWTH, VictimState.WAIT, 1),
    )
    report = attribution(header(), [first, second], [first, second], PAGE, events)
    assert report.realized_by_tier is not None
    assert report.realized_by_tier.model_dump() == {"device": 4, "host": 0, "storage": 4}


def test_a_match_is_before_what_the_request_stored_itself() -> None:
    """As seen on the tiny M3: what turn 1 of ``a`` computed is evicted before the next batch says that it had its first
    token. Its loss is still due to ``b``'s first turn."""
    sent = [("a", 0, 0.0, 0), ("b", 0, 4.0, 0), ("a", 1, 8.0, 8), ("b", 1, 11.0, 8)]
    records = [
        record(s, turn, 17, 16 if turn else 0, cached_tokens=hit, sent_s=at, first_token_s=at + 2.8, done_s=at + 2.9,
               recorded_stop="tool_use")
        for s, turn, at, hit in sent
    ]  # fmt: skip
    first = {"a": 0, "b": 4}
    paths = {
        (s, "main", turn): RequestPages(session=s, flow="main", turn=turn, prompt=((first[s], 4),), answer=())
        for s, turn, _, _ in sent
    }
    told: list[tuple[float, tuple[Any, ...]]] = [
        (2.0, (("store", 1, ((0, 4),)),)),
        (6.0, (("store", 1, ((4, 2),)), ("remove", 1, ((2, 2),)))),
        (6.5, (("store", 1, ((6, 2),)),)),
        (10.0, (("remove", 1, ((6, 2),)), ("store", 1, ((2, 2),)))),
        (13.0, (("remove", 1, ((2, 2),)), ("store", 1, ((6, 2),)))),
    ]
    batches = [EventBatch(seq=i, ts=at, at=at, ops=ops) for i, (at, ops) in enumerate(told)]
    events = KvEvents(_header(), batches, paths)
    a, b = attribute_with_events(records, records[2:], events, CacheKind(PAGE))
    assert a.losses == (Loss(Cause.EVICTED, 8, 8, EvictedBy.NEW_SESSION, VictimState.TOOL_WAIT, 1),)
    assert b.losses == (Loss(Cause.EVICTED, 8, 8, EvictedBy.RECOMPUTE, VictimState.TOOL_WAIT, 2),)


def test_facts_of_a_request_reach_the_record() -> None:
    book = FactBook(remembered=2)
    book.admission("a", False, 1.0)
    book.admission("a", False, 2.0)
    book.admission("b", True, 2.0)
    book.admission("a", True, 3.5)
    assert (book.take("a"), book.take("a"), book.take("b")) == ({"held_s": 2.5}, None, None)
    for name in "cde":
        book.of(name)["found"] = 1
    assert (len(book), book.take("c")) == (2, None)  # ranks that answer nobody keep no more than that

    note_lookup("r", "hit", 512)
    note_load("r", "late")
    note_load("r", "restored")
    facts = BOOK.take("r")
    assert facts == {"lookup": "hit", "found": 512, "load": "late"}
    assert KEY == FACTS
    outcome, ids = Outcome(), list[int]()
    meta = '{"prompt_tokens": 4, "completion_tokens": 1, "cached_tokens": 0, "agentserve": [%s]}'
    sent = '{"lookup": "hit", "found": 512, "load": "late", "held_s": 0.5, "unknown_later": 1}'
    assert _take_chunk('{"output_ids": [7], "meta_info": %s}' % (meta % sent), outcome, ids) is None
    assert outcome.offload == OffloadAnswer(lookup="hit", found=512, load="late")
    assert outcome.held_s == 0.5


def test_the_streamer_that_carries_facts_fits_upstream() -> None:
    """Fails when SGLang's extension point moves."""
    (hook,) = sglang_plugin.fact_hooks()
    module, _, name = hook.target.rpartition(".")
    upstream = getattr(pkgutil.resolve_name(module), name)
    ours: Any = hook.function
    assert issubclass(ours, upstream)
    for method in ("build_additional_customized_info", "is_request_level_customized_info_key"):
        assert inspect.signature(getattr(ours, method)) is not None
        assert list(inspect.signature(getattr(ours, method)).parameters) == list(
            inspect.signature(getattr(upstream, method)).parameters
        )
    assert upstream.has_additional_customized_info is False
    streamer = object.__new__(ours)
    note_lookup("mine", "miss")
    requests = [SimpleNamespace(rid=rid, finished=lambda: True) for rid in ("never looked up", "mine")]
    assert streamer.build_additional_customized_info(requests) == {KEY: [[], [{"lookup": "miss", "found": 0}]]}
    assert streamer.build_additional_customized_info(requests) == {}


def test_what_lmcache_stored_is_published_as_parts_of_a_path() -> None:
    """Nodes of 3 and 2 pages; pages 1 to 3 are stored. Hashes are those that the device's events have."""
    from sglang.srt.mem_cache.events import KVCacheEventRecorder
    from sglang.srt.mem_cache.radix_cache import RadixKey

    from agentserve.runtime.sglang_lmcache_events import publish_stored

    def node(tokens: list[int], parent: Any) -> Any:
        key = RadixKey(array("q", tokens))
        return SimpleNamespace(key=key, parent=parent, hash_value=None, event_hash_value=None)

    root = SimpleNamespace(key=RadixKey(array("q")), parent=None, hash_value=[], event_hash_value=None)
    upper = node(list(range(12)), root)
    lower = node(list(range(12, 20)), upper)
    events = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    events.record_store(upper)
    events.record_store(lower)
    (device,) = events.take()
    publish_stored(events, lower, PAGE, 4 * PAGE)
    (below,) = events.take()
    assert (below.medium, below.token_ids) == ("EXTERNAL", list(range(4, 16)))
    assert (below.parent_block_hash, below.block_hashes) == (device.block_hashes[0], device.block_hashes[1:4])
    publish_stored(KVCacheEventRecorder(enabled=False, page_size=PAGE), lower, 0, 4 * PAGE)
