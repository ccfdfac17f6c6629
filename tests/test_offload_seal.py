"""Seals, fingerprints, deadlines, quarantine and settings: what offloading decides without LMCache."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from offload.daemon import DaemonSpec, daemon_command, redis_adapter
from offload.fingerprint import FingerprintError, fingerprint
from offload.guard import DeadlineFuture, Held, Looks, Quarantine, Refused
from offload.owed import Asked, Due, OwedLocks
from offload.processes import dead, listener
from offload.seal import Sealer, new_seals, pages_of
from offload.segments import clear_stale_segments, stale_segments
from offload.settings import OffloadError, OffloadSettings, settings_from

PAGE = 4
PAGES = 8


def planes(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, 8)] * 2 + [(1, 8)]
    return [torch.randn(PAGES * PAGE, *shape, generator=generator) for shape in shapes]


def sealed() -> tuple[list[torch.Tensor], Sealer, torch.Tensor, torch.Tensor]:
    made = planes()
    sealer = Sealer(made, new_seals(PAGES, "cpu"), PAGE, "weights")
    pages = torch.tensor([1, 4, 6])
    digests = sealer.digests(list(range(12)), "", 0)
    sealer.write(pages, digests)
    return made, sealer, pages, digests


def test_a_sealed_page_passes_and_any_changed_byte_of_any_plane_fails() -> None:
    made, sealer, pages, digests = sealed()
    assert sealer.failures(pages, digests) == 0
    rng = random.Random(1)
    for plane in made:
        data = plane.view(torch.uint8)
        for _ in range(20):
            slot = int(pages[rng.randrange(3)]) * PAGE + rng.randrange(PAGE)
            byte = data[slot].view(-1)
            place, bit = rng.randrange(byte.numel()), 1 << rng.randrange(8)
            byte[place] ^= bit
            assert sealer.failures(pages, digests) == 1
            byte[place] ^= bit
    assert sealer.failures(pages, digests) == 0


def test_pages_slots_and_planes_that_changed_places_fail() -> None:
    made, sealer, pages, digests = sealed()
    assert sealer.failures(pages.flip(0), digests) == 2  # the middle one is where it was
    first, second = made[0].clone(), made[1].clone()
    made[0].copy_(second)
    made[1].copy_(first)
    assert sealer.failures(pages, digests) == 3
    made[0].copy_(first)
    made[1].copy_(second)
    slots = torch.arange(4, 8)
    made[2][slots] = made[2][slots.flip(0)]
    assert sealer.failures(pages, digests) == 1


def test_a_page_belongs_to_all_tokens_before_it_to_the_salt_and_to_the_weights() -> None:
    made, sealer, pages, _ = sealed()
    tokens = list(range(12))
    assert sealer.failures(pages, sealer.digests([99, *tokens[1:]], "", 0)) == 3
    assert sealer.failures(pages, sealer.digests([*tokens[:11], 99], "", 0)) == 1
    assert sealer.failures(pages, sealer.digests(tokens, "salt", 0)) == 3
    other = Sealer(made, new_seals(PAGES, "cpu"), PAGE, "other weights")
    assert not set(other.digests(tokens, "", 0).tolist()) & set(sealer.digests(tokens, "", 0).tolist())
    assert torch.equal(sealer.digests(tokens, "", 1), sealer.digests(tokens, "", 0)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_every_element_type_is_sealed_by_its_bytes(dtype: torch.dtype) -> None:
    plane = torch.randn(PAGES * PAGE, 1, 16).to(dtype)
    sealer = Sealer([plane], new_seals(PAGES, "cpu"), PAGE, "")
    pages, digest = torch.tensor([2]), torch.tensor([7])
    sealer.write(pages, digest)
    assert sealer.failures(pages, digest) == 0
    plane.view(torch.uint8)[9, 0, 3] += 1
    assert sealer.failures(pages, digest) == 1


def test_planes_that_are_no_whole_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="64-bit words"):
        Sealer([torch.zeros(PAGES * PAGE + 1, 1, 8)], new_seals(PAGES, "cpu"), PAGE, "")
    with pytest.raises(ValueError, match="64-bit words"):
        Sealer([torch.zeros(PAGES * PAGE, 1, 1, dtype=torch.uint8)], new_seals(PAGES, "cpu"), PAGE, "")


def test_pages_of_slots() -> None:
    assert pages_of(torch.tensor([8, 9, 10, 11, 4, 5, 6, 7]), PAGE).tolist() == [2, 1]


def checkpoint(folder: Path, weights: bytes, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(orjson.dumps({"hidden_size": 8, **config}))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_the_fingerprint_follows_weights_config_layout_and_settings_only(tmp_path: Path) -> None:
    weights = random.Random(0).randbytes(3_000_000)
    a = checkpoint(tmp_path / "a", weights)
    base = fingerprint(a, ["K (1, 8)"], {"dtype": "float32"})
    assert base == fingerprint(
        checkpoint(tmp_path / "b", weights, transformers_version="5"), ["K (1, 8)"], {"dtype": "float32"}
    )
    others = {
        fingerprint(
            checkpoint(tmp_path / "c", random.Random(1).randbytes(3_000_000)), ["K (1, 8)"], {"dtype": "float32"}
        ),
        fingerprint(checkpoint(tmp_path / "d", weights[:-1]), ["K (1, 8)"], {"dtype": "float32"}),
        fingerprint(checkpoint(tmp_path / "e", weights, rope_theta=1), ["K (1, 8)"], {"dtype": "float32"}),
        fingerprint(a, ["K (1, 8)", "index-K (1, 8)"], {"dtype": "float32"}),
        fingerprint(a, ["K (1, 8)"], {"dtype": "bfloat16"}),
    }
    assert len(others) == 5
    assert base not in others


def test_a_checkpoint_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(FingerprintError, match=r"config\.json"):
        fingerprint(tmp_path, [], {})
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FingerprintError, match="holds no safetensors"):
        fingerprint(tmp_path, [], {})


class Answer:
    """A request's answer that comes when told."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done

    def result(self, timeout: float | None = None) -> bool:
        return self.done


def test_a_store_is_given_up_at_its_deadline_or_when_the_daemon_is_dead() -> None:
    now, dead, may = [0.0], [False], [True]
    answer = Answer()
    made = DeadlineFuture(answer, 10.0, may_give_up=lambda: may[0], gone=lambda: dead[0], clock=lambda: now[0])
    assert not made.query()
    may[0], now[0] = False, 11.0
    assert not made.query()  # without seals a living daemon's read is waited for
    dead[0] = True
    assert made.query()
    with pytest.raises(TimeoutError):
        made.result(timeout=0)
    dead[0], may[0] = False, True
    assert made.query()
    answer.done = True
    assert made.query()
    assert made.result(timeout=0) is True


@pytest.mark.parametrize("step_s", [0.01, 0.4, 1.3, 1.6, 2.5, 5.0])
def test_a_lookup_is_given_up_at_the_last_look_in_time(step_s: float) -> None:
    now, deadline_s = 100.0, 2.0
    looks = Looks(now)
    assert not looks.overdue(now, deadline_s)
    assert not looks.last_chance(now, deadline_s)  # at the first look nothing is known of steps
    while not (looks.overdue(now, deadline_s) or looks.last_chance(now, deadline_s)):
        looks.missed(now)
        now += step_s
        looks.step(now)
    assert looks.held_s == pytest.approx(now - 100)
    assert min(deadline_s, step_s) - 1e-9 <= looks.held_s <= max(deadline_s + 1, step_s) + 1e-9


def test_steps_without_a_look_hold_nobody() -> None:
    looks = Looks(0.0)
    looks.missed(0.0)
    for now in (0.5, 1.0, 3.0):  # the cache is full: the scheduler looks for nothing
        looks.step(now)
    looks.missed(4.0)
    looks.step(4.25)
    assert looks.held_s == 0.75


def test_quarantine_frees_in_order_and_only_what_nobody_can_write_to() -> None:
    first, second, third = Answer(), Answer(), Answer()
    dead = [False]
    held = Quarantine()
    loads = [Held(answer, lambda: dead[0], name) for name, answer in (("a", first), ("b", second), ("c", third))]
    for load in loads:
        held.add(load)
    second.done = True
    assert held.ready() == 0
    assert len(held) == 3
    first.error = RuntimeError("refused")
    assert held.ready() == 2
    assert not any(load.query() for load in loads)  # ready here, and perhaps on no other rank
    assert held.release(2) == ["a", "b"]
    assert [load.query() for load in loads] == [True, True, False]
    assert held.ready() == 0
    dead[0] = True
    assert held.release(held.ready()) == ["c"]
    assert len(held) == 0


def test_locks_are_given_back_once_in_time_and_after_the_answers_they_build_on() -> None:
    now, dead = [0.0], [False]
    owed = OwedLocks(free_within_s=10, remembered=2, clock=lambda: now[0])
    lookup, store, unlock = Answer(), Answer(), Answer()
    assert Asked(0.0, lambda: False).clear
    assert not Asked(0.0, lambda: False, key="k").clear
    owed.add("lost", Asked(0.0, lambda: dead[0], after=[Answer()]))
    owed.add("lookup", Asked(0.0, lambda: False, "key", [lookup]))
    owed.add("store", Asked(4.0, lambda: dead[0], after=[store]))
    assert "lost" not in owed  # the oldest, beyond what is remembered
    assert owed.due() == []
    lookup.done = True
    assert owed.due() == owed.due() == [Due("lookup", "key")]
    owed.unlocking("lookup", unlock)
    assert owed.due() == []  # never a second unlock
    unlock.done = True
    assert owed.due() == [Due("lookup", None)]
    owed.done("lookup")
    assert "lookup" not in owed
    # Too late to unlock: the locks have ended by themselves, and others may be in their place.
    owed.add("old", Asked(0.0, lambda: False, "key", [Answer()]))
    now[0] = 10.5
    assert owed.due() == [Due("old", "key", in_time=False)]
    # No answer comes from a dead daemon; its successor may have been asked.
    dead[0] = True
    assert owed.due() == [Due("store", None), Due("old", "key", in_time=False)]
    assert len(owed) == 2


def test_refused_pages_are_tried_again_after_a_while() -> None:
    now = [0.0]
    refused = Refused(10.0, clock=lambda: now[0])
    assert refused.first([5, 6, 7]) == 3
    refused.add([6])
    assert refused.first([5, 6, 7]) == 1
    assert refused.first([5, 7]) == 2
    now[0] = 11.0
    assert refused.first([5, 6, 7]) == 3
    refused.add([9])
    assert len(refused) == 1  # forgotten, not only ignored


def test_settings_travel_by_environment() -> None:
    settings = replace(OffloadSettings(), port=7000, verify=False, load_deadline=1.5)
    assert settings_from(settings.environment()) == settings
    assert settings_from({}) is None
    with pytest.raises(OffloadError, match="AGENTSERVE_OFFLOAD"):
        settings_from({"AGENTSERVE_OFFLOAD": '{"prot": 1}'})
    with pytest.raises(OffloadError, match="'load_deadline' must be more than 0"):
        replace(settings, load_deadline=0.0)
    with pytest.raises(OffloadError, match="'port'"):
        replace(settings, port=0)


def test_the_daemons_command_names_the_redis_that_was_asked_for() -> None:
    spec = DaemonSpec("127.0.0.1", 1, 2, 512, 3.0, l2="redis://me:pa%40ss@box:7000", redis_client="resp")
    argv = daemon_command(spec, "lmcache")
    assert argv[:2] == ["lmcache", "server"]
    assert argv[argv.index("--chunk-size") + 1] == "512"
    adapter = orjson.loads(argv[argv.index("--l2-adapter") + 1])
    assert adapter == {"type": "resp", "host": "box", "port": 7000, "username": "me", "password": "pa@ss"}
    assert orjson.loads(argv[argv.index("--server-module") + 1]) == {"module_path": "offload.lmcache_tiers"}
    assert "--disable-observability" not in argv  # the module listens to an event
    alone = daemon_command(spec._replace(l2=None), "lmcache")
    assert "--disable-observability" in alone
    assert "--server-module" not in alone
    assert redis_adapter("redis://box", "valkey")["startup_nodes"] == "box:6379"
    for wrong in ("box:6379", "http://box", "redis://", "redis://box:x", "redis://box/3"):
        with pytest.raises(OffloadError, match=r"write it as redis://"):
            redis_adapter(wrong, "valkey")


def test_segments_of_dead_processes_only_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "lmcache_kv_999999999_0").write_bytes(b"x" * 10)
    (tmp_path / f"lmcache_kv_{os.getpid()}_0").write_bytes(b"x")
    (tmp_path / "lmcache_kv_other").write_bytes(b"x")
    assert [path.name for path in stale_segments(tmp_path)] == ["lmcache_kv_999999999_0"]
    assert clear_stale_segments(tmp_path) == 10
    assert len(list(tmp_path.iterdir())) == 2


def test_the_process_behind_a_port_is_found_and_seen_dead() -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        found = listener(port)
        assert found is not None
        assert found.pid == child.pid
        assert not dead(found)
        child.kill()  # not reaped yet: a zombie writes no more
        deadline = time.monotonic() + 30
        while not dead(found):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert dead(found)
    assert listener(port) is None
