"""The watch page: its counts by hand and against an unlimited cache, then on the running server and in a browser."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from agentserve.audit.counters import Metrics
from agentserve.cli.diagnose import command as diagnose_command
from agentserve.cli.watch import command
from agentserve.runtime.policy_sessions import SessionTable
from agentserve.watch.fates import Fates, SeenPages
from agentserve.watch.points import Ring, point_of
from agentserve.watch.settings import OPEN_PAGE, PAGE
from agentserve.watch.snapshot import snapshot
from agentserve.watch.state import Choice, read_states, scheduler_state, write_state
from eval.bench.browser import Browser, installed
from radix_cache.features import Stop
from radix_cache.gaps import GapTable
from tests.servers import TinyServer

PAGE_SIZE = 4


def test_fates_by_hand() -> None:
    seen = SeenPages(PAGE_SIZE)
    first = list(range(10))  # two whole pages
    assert seen.begin(first, 0) == Fates(hit=0, in_flight=0, lost=0, new=10)
    # The same prompt while the first still runs; its last token is always computed.
    assert seen.begin(first, 0) == Fates(hit=0, in_flight=8, lost=0, new=2)
    seen.computed(first)
    assert seen.begin(first, 8) == Fates(hit=8, in_flight=0, lost=0, new=2)
    assert seen.begin(first, 4) == Fates(hit=4, in_flight=0, lost=4, new=2)
    # An answer makes the third page; another salt shares nothing.
    seen.computed([*first, 10, 11, 12])
    assert seen.begin([*first, 10, 11, 12, 13], 0) == Fates(hit=0, in_flight=0, lost=12, new=2)
    assert seen.begin(first, 0, salt="x") == Fates(hit=0, in_flight=0, lost=0, new=10)
    # One that was given up before it was computed leaves nothing that others could wait for.
    other = list(range(100, 110))
    seen.begin(other, 0)
    seen.abandoned(other)
    assert seen.begin(other, 0) == Fates(hit=0, in_flight=0, lost=0, new=10)
    # A prompt of two whole pages can hit one of them.
    assert seen.begin(first[:8], 4) == Fates(hit=4, in_flight=0, lost=0, new=4)
    assert seen.begin([], 0) == Fates(0, 0, 0, 0)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=14), st.integers(0, 3), st.booleans()), max_size=12))
def test_fates_sum_to_the_prompt_and_reach_what_an_unlimited_cache_has(
    requests: list[tuple[list[int], int, bool]],
) -> None:
    seen = SeenPages(PAGE_SIZE)
    known: set[tuple[int, ...]] = set()
    ready: set[tuple[int, ...]] = set()
    for prompt, pages, done in requests:
        ends = list(range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE))
        reachable = [n for n in ends if n <= len(prompt) - 1]
        best = max((n for n in reachable if all(tuple(prompt[:m]) in known for m in ends if m <= n)), default=0)
        now = max((n for n in reachable if all(tuple(prompt[:m]) in ready for m in ends if m <= n)), default=0)
        cached = min(pages * PAGE_SIZE, best)
        fates = seen.begin(prompt, cached)
        assert sum(fates) == len(prompt)
        assert fates.hit == cached
        assert fates.lost == max(0, now - cached)
        assert fates.hit + fates.lost + fates.in_flight == max(best, cached)
        known |= {tuple(prompt[:n]) for n in ends}
        if done:
            seen.computed(prompt)
            ready |= {tuple(prompt[:n]) for n in ends}


def test_pages_are_forgotten_beyond_the_limit() -> None:
    seen = SeenPages(PAGE_SIZE, limit=3)
    for number in range(50):
        seen.computed([number] * 8)
    assert len(seen) == 3
    assert seen.begin([49] * 9, 0).lost == 8
    assert seen.begin([0] * 9, 0).new == 9


def table() -> SessionTable:
    made = SessionTable(GapTable(), page_size=PAGE_SIZE)
    for number, (name, stop) in enumerate(
        [("tool", Stop.TOOL), ("user", Stop.TURN), ("run", None), ("end", Stop.TURN)]
    ):
        flow = made.arrive(name, list(range(8)), name, float(number))
        flow.session.started = True
        if stop is not None:
            made.finish(flow, name, stop, 12, number + 0.5)
    made.end("end")
    return made


def test_sessions_travel_between_processes_by_a_file(tmp_path: Path) -> None:
    state = scheduler_state(table(), Choice("gittins", "gate:0.9"), 10.0, 1000.0)
    write_state(tmp_path, state)
    assert read_states(tmp_path) == [state]
    rows = {row.session: row for row in state.sessions}
    assert {name: row.state for name, row in rows.items()} == {
        "tool": "tool_wait",
        "user": "user_wait",
        "run": "running",
        "end": "ended",
    }
    assert (rows["tool"].context, rows["tool"].idle_s, rows["end"].context) == (12, 9.5, 0)
    # A file that another process is writing, or of another version, hides nothing else.
    (tmp_path / "agentserve_watch_1.json").write_text('{"at_unix"')
    assert read_states(tmp_path) == [state]


METRICS = """
agentserve_prompt_tokens_total{{fate="hit"}} {hit}
agentserve_prompt_tokens_total{{fate="new"}} {new}
agentserve_prompt_tokens_total{{fate="lost"}} {lost}
agentserve_evicted_tokens_total{{policy="gittins",victim="ended"}} {evicted}
sglang:cached_tokens_total{{cache_source="device"}} {hit}
sglang:cache_hit_rate 0.124
sglang:num_running_reqs 3
"""


def metrics(**values: int) -> Metrics:
    return Metrics.from_text(METRICS.format(**values))


def test_windows_are_differences_and_a_restarted_server_is_not_negative() -> None:
    ring = Ring()
    ring.add(point_of(metrics(hit=100, new=900, lost=0, evicted=0), 0.0))
    ring.add(point_of(metrics(hit=500, new=1000, lost=100, evicted=64), 100.0))
    ring.add(point_of(metrics(hit=1400, new=1100, lost=200, evicted=64), 155.0))
    made = snapshot(ring, [], {"model": "m"}, 1000.0)
    minute, five, _ = made["windows"]
    assert (minute["covered_s"], five["covered_s"]) == (155.0 - 0.0, 155.0)
    assert five["fates"] == {"hit": 1300, "in_flight": 0, "lost": 200, "new": 200}
    assert (five["hit_rate"], five["possible_rate"]) == (1300 / 1700, 1500 / 1700)
    assert (five["evicted_tokens"], five["evicted_by_victim"]) == (64, {"ended": 64})
    assert made["since_start"]["hit_rate"] == 1400 / 2700
    assert [step["hit_rate"] for step in made["series"]] == [400 / 600, 900 / 1100]
    ring.add(point_of(metrics(hit=10, new=20, lost=0, evicted=0), 160.0))
    assert snapshot(ring, [], {}, 0.0)["series"][-1]["hit_rate"] == 10 / 30
    assert json.dumps(made)


def test_a_gauge_of_the_last_batch_is_no_rate() -> None:
    """sglang:cache_hit_rate is overwritten by every batch (0.124 here); the page's rate is the counters' alone."""
    ring = Ring()
    ring.add(point_of(metrics(hit=838, new=162, lost=0, evicted=0), 0.0))
    assert snapshot(ring, [], {}, 0.0)["since_start"]["hit_rate"] == 0.838


# --- the running server


@pytest.fixture
def watched(tiny_server: TinyServer) -> TinyServer:
    tiny_server.flush()
    return tiny_server


def look(server: TinyServer) -> dict[str, Any]:
    seen: dict[str, Any] = httpx.get(f"{server.url}{PAGE}.json", timeout=60).raise_for_status().json()
    return seen


@pytest.mark.server
def test_the_page_counts_what_the_server_hit(watched: TinyServer) -> None:
    before = look(watched)["since_start"]["fates"]
    prompt = [(11 * i) % 300 + 3 for i in range(900)]
    cached = watched.generate(prompt, 3)["meta_info"]["cached_tokens"]
    cached += watched.generate(prompt, 3)["meta_info"]["cached_tokens"]
    watched.flush()  # what was cached is lost
    cached += watched.generate(prompt, 3)["meta_info"]["cached_tokens"]
    seen = look(watched)
    after = seen["since_start"]["fates"]
    grown = {fate: after[fate] - before[fate] for fate in after}
    assert grown == {"hit": cached, "in_flight": 0, "lost": 896, "new": 900 + 2 * 4}
    assert cached == 896
    assert sum(grown.values()) == 3 * 900
    assert (seen["server"]["page_size"], seen["server"]["policy"], seen["server"]["can_act"]) == (128, None, False)
    assert seen["now"]["kv_tokens"] > 0
    assert any("launch with --policy" in text for text in seen["evidence"])


@pytest.mark.server
def test_the_page_is_read_only_without_an_admin_key(watched: TinyServer) -> None:
    for action in ("flush", "close?session=a"):
        answer = httpx.post(f"{watched.url}{PAGE}/{action}", headers={"Authorization": "Bearer guess"}, timeout=60)
        assert answer.status_code == 403
        assert "--admin-api-key" in answer.json()["error"]
    assert httpx.get(watched.url + OPEN_PAGE, timeout=60).text.startswith("<!DOCTYPE html>")
    assert "sglang:prompt_tokens_total" in httpx.get(watched.url + "/metrics", follow_redirects=True, timeout=60).text


@pytest.mark.server
def test_the_command_shows_the_same(watched: TinyServer) -> None:
    result = CliRunner().invoke(command, [watched.url + "/v1", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["schema_version"] == 1
    table_ = CliRunner().invoke(command, [watched.url, "--once"], env={"COLUMNS": "120"})
    assert table_.exit_code == 0, table_.output
    assert "possible without limit" in table_.stdout
    bare = CliRunner().invoke(command, [watched.url.removeprefix("http://"), "--json"])
    assert bare.exit_code == 0, bare.output
    gone = CliRunner().invoke(command, ["http://127.0.0.1:9", "--once"])
    assert gone.exit_code != 0
    assert "no server answers" in gone.output


@pytest.mark.server
@pytest.mark.skipif(not installed(), reason="needs Chromium and chromedriver")
def test_the_page_in_a_browser(watched: TinyServer) -> None:
    prompt = [(13 * i) % 300 + 3 for i in range(400)]
    watched.generate(prompt, 3)
    watched.generate(prompt, 3)
    with Browser(1280, 900) as browser:
        for width in (1280, 390):
            browser.resize(width, 900)
            browser.open(watched.url + PAGE)
            deadline = time.monotonic() + 60
            while not browser.run("return Number(document.body.dataset.looks || 0)"):
                assert time.monotonic() < deadline, browser.run("return document.body.innerText")
                time.sleep(0.1)
            text = browser.run("return document.body.innerText")
            assert "hit rate" in text
            assert "read-only" in text
            assert browser.run("return document.getElementById('trouble').textContent") == ""
            # Nothing is wider than the screen.
            assert browser.run("return document.documentElement.scrollWidth") <= width
        assert [m.text for m in browser.messages() if m.level == "SEVERE"] == []
        assert [url for url in browser.outside() if not url.startswith(watched.url)] == []


@pytest.mark.server
def test_sessions_victims_the_admin_key_and_the_request_log(lru_server: TinyServer, tmp_path: Path) -> None:
    """A server with a policy of ours, too little memory for three conversations, an admin key and a request log."""
    url, key = lru_server.url, lru_server.headers
    for session in range(3):
        stop = {"agentserve_stop": "tool_use" if session else "end_turn"}
        lru_server.post(
            "/generate",
            input_ids=[(31 * i * (session + 1)) % 300 + 3 for i in range(1700)],
            sampling_params={"max_new_tokens": 2, "temperature": 0, "custom_params": stop},
            session_id=f"s{session}",
        )

    def seen() -> dict[str, Any]:
        # The scheduler publishes with its work, at most every two seconds: a request makes it do so.
        time.sleep(2.1)
        lru_server.generate([5], 1)
        found: dict[str, Any] = httpx.get(f"{url}{PAGE}.json", timeout=60).raise_for_status().json()
        return found

    first = seen()
    assert (first["server"]["policy"], first["server"]["can_act"]) == ("lru", True)
    states = {row["session"]: row["state"] for row in first["schedulers"][0]["sessions"]}
    assert [states[f"s{n}"] for n in range(3)] == ["user_wait", "tool_wait", "tool_wait"]
    evicted = first["since_start"]["evicted_by_victim"]
    assert sum(evicted.values()) == first["since_start"]["evicted_tokens"] > 0
    assert set(evicted) <= {"waits_turn", "waits_tool", "waits_unknown", "unknown", "shared"}

    wrong = httpx.post(f"{url}{PAGE}/flush", headers={"Authorization": "Bearer x"}, timeout=60)
    assert wrong.status_code == 401
    assert httpx.post(f"{url}{PAGE}/close", headers=key, timeout=60).status_code == 400
    assert httpx.post(f"{url}{PAGE}/nothing", headers=key, timeout=60).status_code == 404
    httpx.post(f"{url}{PAGE}/close?session=s2", headers=key, timeout=60).raise_for_status()
    last = seen()
    states = {row["session"]: row["state"] for row in last["schedulers"][0]["sessions"]}
    assert (states["s1"], states["s2"]) == ("tool_wait", "ended")
    assert httpx.post(f"{url}{PAGE}/flush", headers=key, timeout=60).json() == {"done": True}

    # SGLang's own log of two turns, the second of which differs from token 500 on: agentserve diagnose reads it.
    first_turn = [(7 * i) % 90 + 33 for i in range(700)]
    for turn, ids in enumerate((first_turn, [*first_turn[:500], 32, *first_turn[501:], *first_turn[:100]])):
        lru_server.generate(ids, 2, rid=f"diagnosed-{turn}")
    # Of this log, which may hold what other tests sent, the lines of the two.
    lines = [line for log in lru_server.folder.glob("*.log") for line in log.read_text().splitlines()]
    log = tmp_path / "requests.log"
    log.write_text("".join(f"{line}\n" for line in lines if '"diagnosed-' in line))
    said = CliRunner().invoke(diagnose_command, [str(log), "--json"])
    assert said.exit_code == 0, said.output
    (broken,) = json.loads(said.stdout)["broken"]
    assert (broken["unit"], broken["at"], broken["before"]) == ("token", 500, 701)
    assert broken["cached_tokens"] == 500 // 128 * 128
    assert broken["new_text"].startswith(" ")
