"""Everything at once on a real server: two ranks with a daemon each, EAGLE3, index reuse, our policies, LMCache."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentserve.checkpoint.tiny_eagle3 import write_tiny_eagle3
from agentserve.launch.host import free_ports
from agentserve.launch.tiny import tiny_server
from offload.segments import stale_segments
from tests.recorded_draft import enable, proposals
from tests.test_offload_server import Client, close

pytestmark = [pytest.mark.server, pytest.mark.timeout(1500)]

CHUNK = 256


def tokens(seed: str, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 250) for _ in range(count)]


def wait_for(count: Callable[[], float], expected: float) -> None:
    deadline = time.monotonic() + 300
    while count() < expected:
        assert time.monotonic() < deadline, f"{count()} of {expected}"
        time.sleep(0.2)
    assert count() == expected


def test_what_is_restored_is_what_was_there_and_ends_of_ended_sessions_are_not_stored(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    port = free_ports(4)
    settings: dict[str, Any] = {
        "kv.capacity_tokens": 8192,
        "prefill_chunk": 1024,
        "tp": 2,
        "index_reuse": "freq:2",
        "radix.policy": "gittins",
        "radix.admission": "gate:0.9",
        "eagle3.draft": str(write_tiny_eagle3(tmp_path / "draft")),
        "offload.backend": "lmcache",
        "offload.port": port,
        "offload.http_port": port + 1,
        "offload.memory_gb": 1.0,
        "offload.store_delay": 5.0,
        "offload.lookup_deadline": 10.0,
        "offload.load_deadline": 10.0,
        "env": dict(enable(tmp_path / "plugin")),
    }
    logs = tmp_path / "logs"
    # Of both lengths the device holds, before the last token, as much as LMCache's whole chunks.
    head = tokens("head", 512)
    live, over = head + tokens("live", 1800), head + tokens("over", 1024)
    with tiny_server(settings, checkpoint=tiny_checkpoint, log=logs / "server.log") as server:
        client = Client(server.plan.url)

        def ask(name: str, ids: list[int], session: str) -> Any:
            return client.generate(ids, new=16, rid=name, session_id=session)

        def stored() -> float:
            return client.counter("agentserve_offload_tokens_total", event="stored", rank="1")

        def not_stored(reason: str) -> float:
            return client.counter("agentserve_offload_tokens_not_stored_total", reason=reason, rank="1")

        cold = ask("cold", live, "live")
        assert (cold.cached, stored()) == (0, 0)
        hit = ask("hit", live, "live")
        assert (hit.cached, hit.restored) == (2304, 0)
        wait_for(stored, 2304)
        # A conversation that ends: what it shares is stored already, its own end never.
        ended = ask("over", over, "over")
        client.http.post("/close_session", json={"session_id": "over"}).raise_for_status()
        wait_for(lambda: not_stored("ended"), 1024)
        assert (stored(), not_stored("superseded"), not_stored("evicted")) == (2304, 0, 0)

        client.flush()
        restored = ask("restored", live, "live")
        assert (restored.cached, restored.restored) == (2304, 2304)
        client.flush()
        again = ask("again", over, "another")
        assert again.restored == 512

        assert close(cold, hit)
        assert close(ended, again)
        assert restored[:2] == hit[:2]  # to the last bit
        drafts = proposals(tmp_path / "plugin", "hit")
        assert len({tuple(row) for row in drafts}) > 5  # they depend on what was there before
        assert proposals(tmp_path / "plugin", "restored") == drafts

        for rank in ("0", "1"):
            verified = client.counter("agentserve_offload_tokens_total", event="verified", rank=rank)
            assert verified == client.counter("agentserve_offload_tokens_total", event="restored", rank=rank) == 2816
            assert client.counter("agentserve_offload_tokens_total", event="refused", rank=rank) == 0
    assert {path.name for path in logs.iterdir()} == {"server.log", "lmcache-rank0.log", "lmcache-rank1.log"}
    assert not stale_segments()
