"""The real connector, cache and pool against a real daemon that is frozen, killed, missing or wrong.

Every row of the table in docs/design/offload.md that needs no model is a test here. A daemon's start takes seconds, so
one serves the module; tests leave it healthy.
"""

from __future__ import annotations

import os
import signal
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentserve.checkpoint.tiny import write_tiny_checkpoint
from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.daemon import Daemon, daemon_plan
from agentserve.launch.host import free_port
from eval.bench.offload_rig import locks
from offload.daemon import DaemonSpec
from offload.settings import OffloadError, OffloadSettings
from tests.offload_lab import CHUNK, PAGE, Lab, fill, lab, put, rows, same, slack, tensors, tokens_of, wait_until

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

TIMES = OffloadSettings(
    lookup_deadline=2.0, load_deadline=2.0, store_deadline=2.0, ping_interval=0.5, ping_deadline=3.0
)


@pytest.fixture(scope="module", name="daemon")
def _daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    spec = DaemonSpec("127.0.0.1", free_port(), free_port(), CHUNK, 0.5)
    folder = tmp_path_factory.mktemp("daemon")
    # Freezing it is the tests' business: they thaw it again.
    with Daemon(daemon_plan(spec, folder), folder / "lmcache.log", frozen_after_s=600) as daemon:
        yield daemon


@pytest.fixture(name="settings")
def _settings(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> OffloadSettings:
    settings = replace(TIMES, port=int(daemon.plan.argv[daemon.plan.argv.index("--port") + 1]))
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    return settings


@pytest.fixture(name="bench")
def _bench(settings: OffloadSettings, tiny_checkpoint: Path) -> Iterator[Lab]:
    with lab(settings, tiny_checkpoint) as made:
        assert made.connector.online
        yield made


def prompt(length: int = 1024) -> list[int]:
    """A prompt that no other test has."""
    return tokens_of(time.monotonic_ns(), length)


def stored(bench: Lab, length: int = 1024) -> tuple[list[int], list[torch.Tensor]]:
    """A new prompt whose state is in the daemon, and what its slots held; they are free again."""
    ids = prompt(length)
    slots = bench.take(length)
    held = rows(bench.pool, slots)
    assert bench.store(f"store-{ids[:4]}", ids, slots)
    bench.allocator.free(slots)
    fill(bench.pool, 99)
    return ids, held


@contextmanager
def frozen(daemon: Daemon) -> Iterator[None]:
    assert daemon.pid is not None
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


@contextmanager
def losing(bench: Lab, plane: torch.Tensor) -> Iterator[None]:
    """What is restored of one plane is lost on the way."""
    wait_for = bench.connector._wait_for

    def lossy(operation: Any, *rest: Any) -> bool:
        done = bool(wait_for(operation, *rest))
        plane[operation.device_indices] = 0
        return done

    bench.connector._wait_for = lossy
    try:
        yield
    finally:
        del bench.connector._wait_for


def free_tokens(bench: Lab) -> int:
    return int(bench.allocator.available_size())


def back_online(bench: Lab) -> None:
    wait_until(lambda: bench.connector.online, 120)


def test_a_long_step_or_a_long_queue_makes_no_lookup_late(bench: Lab, daemon: Daemon) -> None:
    ids, _ = stored(bench)
    with frozen(daemon):
        queued, polled = bench.request("queued", ids), bench.request("polled", ids)
        assert not bench.cache.check_prefetch_progress(polled.cache_request_handle)
    time.sleep(TIMES.lookup_deadline + 0.5)  # of the scheduler: nobody looks for the answers
    assert bench.cache.check_prefetch_progress(polled.cache_request_handle)
    assert bench.cache._external_flows["polled"].total_hit == 1024
    assert bench.found(queued) == 1024
    assert bench.connector.online
    for request in (queued, polled):
        bench.connector.finish_request(request.rid)


def nothing_is_held(daemon: Daemon) -> bool:
    return not any(locks(daemon).values())


def test_no_read_lock_stays_with_the_daemon_whatever_became_of_the_request(bench: Lab, daemon: Daemon) -> None:
    ids, _ = stored(bench)
    wait_until(lambda: nothing_is_held(daemon), 10)
    abort = bench.cache.release_aborted_request
    # Aborted before the answer was looked for, and with locks in hand.
    abort(bench.request("unread", ids).cache_request_handle)
    found = bench.request("found", ids)
    assert bench.found(found) == 1024
    assert locks(daemon)["read_locked_count"] > 0
    abort(found.cache_request_handle)
    wait_until(lambda: nothing_is_held(daemon), 10)

    # Given up, aborted, found and never loaded, and loaded too late, all while the daemon is frozen.
    unloaded, late = bench.request("unloaded", ids), bench.request("late", ids)
    assert bench.found(unloaded) == bench.found(late) == 1024
    with frozen(daemon):
        given_up, aborted = bench.request("given up", ids), bench.request("aborted", ids)
        abort(aborted.cache_request_handle)
        assert bench.load(late) is None
        assert bench.found(given_up) == 0
        abort(unloaded.cache_request_handle)
        for request in (given_up, late):
            bench.connector.finish_request(request.rid)
        assert all(bench.connector.owes(r.rid) for r in (given_up, aborted, unloaded, late))
    back_online(bench)
    wait_until(lambda: bench.cache._quarantine.ready() != 0, 60)
    bench.cache.check_hicache_events()
    wait_until(lambda: nothing_is_held(daemon), 30)
    wait_until(lambda: not len(bench.connector._owed), 10)
    assert bench.found(bench.request("given up", ids)) == 1024
    bench.connector.finish_request("given up")


def test_a_drafts_keys_and_values_belong_to_a_prefix(
    settings: OffloadSettings, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    drafts = [write_tiny_eagle3(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    with lab(settings, tiny_checkpoint, draft=drafts[0]) as first:
        assert len(tensors(first.pool)) == 14
        ids, held = stored(first)
    with lab(settings, tiny_checkpoint, seed=7, draft=drafts[0]) as again:
        request = again.request("again", ids)
        assert again.found(request) == 1024
        slots = again.load(request)
        assert slots is not None
        assert same(rows(again.pool, slots), held)
        # Without the draft's values output could not change, but the prefix is not what was stored.
        with losing(again, tensors(again.pool)[-1]):
            request = again.request("lossy", ids)
            assert again.found(request) == 1024
            assert again.load(request) is None
            assert again.connector.online  # the seals refused it, not the daemon
    for other in (drafts[1], None):
        with lab(settings, tiny_checkpoint, draft=other) as another:
            assert another.found(another.request("other", ids)) == 0


def test_full_and_partial_prefixes_come_back_bit_for_bit_after_the_engine_restarted(
    bench: Lab, settings: OffloadSettings, tiny_checkpoint: Path
) -> None:
    ids, held = stored(bench, 2048)
    with lab(settings, tiny_checkpoint, seed=7) as other:
        for name, asked, expected in (
            ("full", [*ids, 1], 2048),
            ("partial", [*ids[:1500], *prompt(500)], 1280),
            ("short", ids[:300], 256),
        ):
            request = other.request(name, asked)
            assert other.found(request) == expected
            fill(other.pool, 8)
            slots = other.load(request)
            assert slots is not None
            assert len(slots) == expected
            assert same(rows(other.pool, slots), [row[:expected] for row in held])
        assert other.found(other.request("unknown", prompt())) == 0


def test_index_keys_that_are_lost_in_a_restore_are_caught(bench: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    other, _ = stored(bench)
    ids, held = stored(bench)
    before = free_tokens(bench)
    with losing(bench, bench.pool.index_k_pool.k_buffer[0]):
        request = bench.request("lossy", ids)
        assert bench.found(request) == 1024
        assert bench.load(request) is None  # recomputed
        bench.cache.check_hicache_events()
        assert free_tokens(bench) == before
        # It is not asked for again, but what comes before it and beside it is.
        assert bench.found(bench.request("known", ids)) == 0
        assert bench.found(bench.request("beside", other)) == 1024
        # What the seals are for: without them the same loss goes unnoticed.
        monkeypatch.setattr(bench.connector, "_sealer", None)
        request = bench.request("unsealed", ids)
        assert bench.found(request) == 1024
        slots = bench.load(request)
        assert slots is not None
        assert not same(rows(bench.pool, slots), held)


@pytest.mark.parametrize(
    ("dtype", "index_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float8_e4m3fn),
    ],
    ids=["bf16", "fp8 K/V and bf16 index K", "fp8"],
)
def test_pools_of_every_element_type_come_back_bit_for_bit_or_not_at_all(
    settings: OffloadSettings, tiny_checkpoint: Path, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    types: dict[str, Any] = {"dtype": dtype, "index_dtype": index_dtype}
    with lab(settings, tiny_checkpoint, **types) as first:
        ids, held = stored(first, 2048)
    with lab(settings, tiny_checkpoint, seed=7, **types) as again:
        for name, asked, expected in (("full", ids, 2048), ("partial", [*ids[:1500], *prompt(500)], 1280)):
            request = again.request(name, asked)
            assert again.found(request) == expected
            fill(again.pool, 8)
            slots = again.load(request)
            assert slots is not None
            assert same(rows(again.pool, slots), [row[:expected] for row in held])
        with losing(again, again.pool.index_k_pool.k_buffer[1]):
            # The cases before this one used the same name for another prompt: their servers' ends ended it.
            request = again.request("lossy", ids)
            assert again.found(request) == 2048
            assert again.load(request) is None
            assert again.connector.online  # the seals refused it, not the daemon
    # As many bytes of another type: SGLang allocates both kinds of FP8 as the same.
    other = torch.float16 if dtype == torch.bfloat16 else torch.float8_e5m2
    with lab(settings, tiny_checkpoint, dtype=other, index_dtype=index_dtype) as another:
        assert another.found(another.request("other type", ids)) == 0


def test_other_weights_of_the_same_shape_under_the_same_path_miss(settings: OffloadSettings, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "m3", seed=1)
    with lab(settings, folder) as first:
        ids, _ = stored(first)
        assert first.found(first.request("same", ids)) == 1024
    write_tiny_checkpoint(tmp_path / "other", seed=2)
    for file in (tmp_path / "other").iterdir():
        file.replace(folder / file.name)
    with lab(settings, folder) as second:
        assert second.found(second.request("other", ids)) == 0


def test_a_frozen_daemon_delays_a_load_by_its_deadline_and_its_late_write_hits_nobody(
    bench: Lab, daemon: Daemon
) -> None:
    ids, held = stored(bench)
    total = free_tokens(bench)
    request = bench.request("late", ids)
    assert bench.found(request) == 1024
    with frozen(daemon):
        started = time.monotonic()
        assert bench.load(request) is None
        assert time.monotonic() - started < TIMES.load_deadline + slack()
        assert not bench.connector.online
        bench.cache.check_hicache_events()
        assert free_tokens(bench) == total - 1024
        # All that is left goes to another owner, who writes to it.
        others = bench.take(total - 1024)
        theirs = rows(bench.pool, others)
        aside = torch.ones(bench.pool.size + PAGE, dtype=torch.bool)
        aside[others] = False
        aside[:PAGE] = False
        quarantined = aside.nonzero().flatten()
        assert bench.cache.has_pending_cache_operations()  # so that SGLang does not flush them
        before = rows(bench.pool, quarantined)
    wait_until(lambda: bench.cache._quarantine.ready() != 0, 60)
    assert not same(rows(bench.pool, quarantined), before), "the daemon did not write late: nothing is proven"
    assert same(rows(bench.pool, others), theirs)
    bench.cache.check_hicache_events()
    assert free_tokens(bench) == 1024
    back_online(bench)
    request = bench.request("again", ids)
    assert bench.found(request) == 1024
    slots = bench.load(request)
    assert slots is not None
    assert same(rows(bench.pool, slots), held)


def test_a_frozen_daemon_delays_one_lookup_by_its_deadline_and_the_next_not_at_all(bench: Lab, daemon: Daemon) -> None:
    ids, _ = stored(bench)
    with frozen(daemon):
        started = time.monotonic()
        assert bench.found(bench.request("first", ids)) == 0
        assert time.monotonic() - started < max(TIMES.lookup_deadline, TIMES.ping_deadline) + slack()
        started = time.monotonic()
        assert bench.found(bench.request("second", ids)) == 0
        assert not bench.connector.online
        assert time.monotonic() - started < slack()
        bench.connector.finish_request("first")
    back_online(bench)
    assert bench.found(bench.request("third", ids)) == 1024


def test_a_frozen_daemon_holds_stored_tokens_no_longer_than_the_deadline(bench: Lab, daemon: Daemon) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids = prompt()
    total = free_tokens(bench)
    slots = bench.take(1024)
    bench.cache.insert(InsertParams(key=RadixKey(array("q", ids), None), value=slots, prev_prefix_len=0))
    with frozen(daemon):
        started = time.monotonic()
        bench.cache._submit_store(SimpleNamespace(rid="slow", extra_key=None, cache_salt=None), array("q", ids))
        bench.cache.evict(EvictParams(num_tokens=1024))
        assert free_tokens(bench) == total - 1024  # locked while the daemon reads
        while bench.cache.has_pending_cache_operations():
            bench.cache.check_hicache_events()
            time.sleep(0.01)
            assert time.monotonic() - started < TIMES.store_deadline + slack()
        bench.cache.evict(EvictParams(num_tokens=1024))
        assert free_tokens(bench) == total
        # Others use the slots while the daemon still has the order to read them.
        fill(bench.pool, 5)
    back_online(bench)
    time.sleep(0.5)
    request = bench.request("poisoned", ids)
    # Whether the daemon stored other data under this key or nothing: it is never returned.
    if bench.found(request):
        assert bench.load(request) is None


def test_what_a_load_continues_may_have_left_the_device_before_it_begins(bench: Lab) -> None:
    """A request that was looked up waits for room, and what the device had of it is evicted meanwhile."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    ids, held = stored(bench)
    total = free_tokens(bench)
    slots = bench.take(512)
    put(bench.pool, slots, [data[:512] for data in held])
    bench.cache.insert(InsertParams(key=RadixKey(array("q", ids[:512]), None), value=slots, prev_prefix_len=0))
    request = bench.request("overtaken", ids)
    assert bench.found(request) == 1024
    assert bench.cache._external_flows[request.rid].local_hit_tokens == 512
    bench.cache.evict(EvictParams(num_tokens=512))
    asked = SimpleNamespace(rid=request.rid, session=None)
    match = bench.cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", ids), None), req=asked))
    assert (match.device_prefix_len, match.host_hit_length) == (0, 1024)
    # The scheduler ends the server where a load brings some of what was promised, and takes none as a miss.
    loaded, _ = bench.cache.init_load_back(
        InitLoadBackParams(best_match_node=match.best_match_node, host_hit_length=match.host_hit_length, req=request)
    )
    assert loaded == 0
    assert free_tokens(bench) == total


def test_a_killed_daemon_is_given_up_at_once_and_used_again_when_it_is_back(bench: Lab, daemon: Daemon) -> None:
    ids, _ = stored(bench)
    total = free_tokens(bench)
    request = bench.request("killed", ids)
    assert bench.found(request) == 1024
    assert daemon.pid is not None
    starts = daemon.starts
    os.kill(daemon.pid, signal.SIGKILL)
    stray = bench.request("stray", ids)  # it reaches the next daemon
    started = time.monotonic()
    assert bench.load(request) is None
    assert time.monotonic() - started < TIMES.load_deadline + slack()
    wait_until(lambda: (bench.cache.check_hicache_events(), free_tokens(bench) == total)[1], 30)  # it is dead
    started = time.monotonic()
    assert bench.found(bench.request("meanwhile", ids)) == 0
    assert time.monotonic() - started < slack()
    for over in (request, stray):
        bench.connector.finish_request(over.rid)
    back_online(bench)
    wait_until(lambda: nothing_is_held(daemon), 30)
    assert daemon.starts == starts + 1
    assert bench.found(bench.request("lost", ids)) == 0  # host memory went with the daemon
    ids, held = stored(bench)
    request = bench.request("anew", ids)
    assert bench.found(request) == 1024
    slots = bench.load(request)
    assert slots is not None
    assert same(rows(bench.pool, slots), held)


def test_without_a_daemon_the_server_starts_and_answers_and_takes_the_daemon_when_it_comes(
    settings: OffloadSettings, tiny_checkpoint: Path, daemon: Daemon
) -> None:
    with frozen(daemon), lab(settings, tiny_checkpoint) as bench:
        assert not bench.connector.online
        started = time.monotonic()
        assert bench.found(bench.request("nobody", prompt())) == 0
        assert not bench.store("nobody", prompt(), bench.take(1024))
        assert time.monotonic() - started < slack()
        os.kill(daemon.pid or 0, signal.SIGCONT)
        back_online(bench)
        ids, _ = stored(bench)
        assert bench.found(bench.request("there", ids)) == 1024


def test_a_daemon_with_other_chunks_is_an_error(settings: OffloadSettings, tiny_checkpoint: Path) -> None:
    with (
        pytest.raises(OffloadError, match=r"has chunks of 256 tokens, this server expects 512; start it with"),
        lab(replace(settings, chunk_tokens=512), tiny_checkpoint),
    ):
        pass
