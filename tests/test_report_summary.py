"""The report's numbers: by hand, and as laws over any records."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.report import ReportError, Slo, summarize
from eval.report import definitions as d
from traces.replay.record import RequestError, RequestRecord, RunEvent, RunHeader, ServerInfo


def header(**changes: Any) -> RunHeader:
    values: dict[str, Any] = {
        "agentserve_version": "0.1.0",
        "run_id": "run",
        "started_unix": 1_700_000_000.0,
        "trace": "small.json",
        "trace_sha256": "ab" * 32,
        "trace_format": "weka",
        "sessions": 2,
        "requests": 4,
        "tokens_per_block": 16,
        "recorded_block_size": 64,
        "prefix_sharing": "session",
        "history": "recorded",
        "concurrency": 2,
        "think": {"mode": "none"},
        "over_limit": "end-flow",
        "seed": 0,
        "server": ServerInfo(base_url="http://127.0.0.1:1", client="sglang", page_size=10),
    }
    return RunHeader(**{**values, **changes})


def record(session: str, turn: int, prompt: int, lcp: int = 0, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "session": session,
        "flow": "main",
        "turn": turn,
        "ready_s": 0.0,
        "sent_s": 0.0,
        "first_token_s": 1.0,
        "done_s": 2.0,
        "think_s": 0.0,
        "prompt_tokens": prompt,
        "prompt_tokens_reported": prompt,
        "output_tokens_wanted": 5,
        "output_tokens": 5,
        "cached_tokens": 0,
        **dict.fromkeys(("session_lcp", "session_output_lcp", "shared_lcp", "shared_output_lcp", "ready_lcp"), lcp),
    }
    return RequestRecord(**{**values, **changes})


FINISHED = [RunEvent(at_s=0, kind="started"), RunEvent(at_s=9, kind="finished")]

SMALL = [
    record("a", 0, 35),
    # Shares 35 + 5 answer tokens with its first turn and 12 of them were still being computed.
    record(
        "a",
        1,
        60,
        session_lcp=35,
        session_output_lcp=40,
        shared_lcp=35,
        shared_output_lcp=47,
        ready_lcp=35,
        cached_tokens=20,
        sent_s=2.0,
        first_token_s=2.5,
        done_s=4.5,
    ),
    # Repeats an earlier prompt to its end; hits more than was ready.
    record("b", 0, 50, session_lcp=0, session_output_lcp=0, shared_lcp=50, shared_output_lcp=50, ready_lcp=10,
           cached_tokens=30, sent_s=4.0, first_token_s=4.1, done_s=4.1, output_tokens=1),
    record("b", 1, 55, lcp=50, error=RequestError(kind="timeout", message="no answer in 60 s"), cached_tokens=None),
]  # fmt: skip


def test_small_run_by_hand() -> None:
    report = summarize(header(), SMALL, FINISHED)
    # Prompts 35 + 60 + 50 = 145; ideal min(lcp, prompt - 1) = 0 + 47 + 49; pages of 10: 0 + 40 + 40.
    hits = {rate.key: rate.hit_tokens for rate in report.rates}
    assert hits == {
        "ideal": 96,
        "aligned": 80,
        "ready": 30 + 10,
        "realized": 20 + 30,
        "per_session": 40,
        "prompts_only": 30 + 40,
        "per_session_prompts_only": 30,
    }
    assert {rate.prompt_tokens for rate in report.rates} == {145}
    realized = report.rate("realized")
    assert realized is not None
    assert realized.rate == 50 / 145
    assert report.mean_rates[-1].mean == pytest.approx((0 + 20 / 60 + 30 / 50) / 3)

    steps = {s.key: (s.tokens, s.lost_tokens, s.gained_tokens) for s in report.chain.steps}
    assert steps == {"page_alignment": (16, 16, 0), "not_ready": (40, 40, 0), "not_attributed": (-10, 10, 20)}
    assert report.chain.gap_tokens == 96 - 50

    done = report.completeness
    assert (done.recorded, done.completed, done.failed, done.missing, done.banner) == (4, 3, 1, 0, None)
    assert [(e.kind, e.requests) for e in report.errors] == [("timeout", 1)]
    assert [(s.session, s.gap_tokens, s.failed) for s in report.sessions] == [("a", 20, 0), ("b", 10, 1)]
    assert [(w.session, w.turn, w.gap_tokens) for w in report.worst] == [("a", 1, 20), ("b", 0, 10)]


def test_latency_by_hand() -> None:
    report = summarize(header(), SMALL, FINISHED, slo=Slo(ttft_s=0.6, tpot_s=0.5))
    rows = {(row.metric, row.group): row for row in report.latency}
    ttft = rows["ttft", "all"]  # 1.0, 0.5, 0.1
    assert (ttft.requests, ttft.p50, ttft.max) == (3, 0.5, 1.0)
    assert ttft.p90 == pytest.approx(0.5 + 0.8 * 0.5)
    assert rows["ttft", "hit >= 50 %"].max == pytest.approx(0.1)  # 30 of 50
    assert rows["ttft", "hit < 50 %"].requests == 2
    assert rows["tpot", "all"].requests == 2  # one output token has no TPOT
    assert rows["tpot", "all"].max == pytest.approx(2.0 / 4)
    assert rows["client_lag", "all"].max == 4.0
    assert not any(metric == "queue" for metric, _ in rows)  # no server said
    assert "queue" not in report.latency_definitions
    assert report.throughput.wall_s == pytest.approx(4.5)
    assert report.throughput.output_tokens_per_s == pytest.approx(11 / 4.5)
    assert report.goodput is not None
    assert (report.goodput.requests, report.goodput.fraction) == (2, 0.5)
    assert [(g.group, g.requests, g.within) for g in report.goodput.groups] == [
        ("hit >= 50 %", 1, 1),
        ("hit < 50 %", 2, 1),
    ]


def test_time_in_the_servers_queue_is_shown_where_it_was_told() -> None:
    told = [r if r.error else r.model_copy(update={"queued_s": 0.1 * (i + 1)}) for i, r in enumerate(SMALL)]
    report = summarize(header(), told, FINISHED)
    (row,) = (row for row in report.latency if (row.metric, row.group) == ("queue", "all"))
    assert (row.requests, row.p50) == (3, pytest.approx(0.2))
    assert report.latency_definitions["queue"].startswith("Queue: ")


def test_a_request_without_count_leaves_theory_too() -> None:
    silent = record("c", 0, 1000, lcp=990, cached_tokens=None)
    with_silent = summarize(header(), [*SMALL, silent], FINISHED)
    without = summarize(header(), SMALL, FINISHED)
    assert with_silent.rates == without.rates
    assert with_silent.chain == without.chain
    assert with_silent.population.without_count == 1


def test_an_impossible_count_is_left_out_and_counted() -> None:
    report = summarize(header(), [*SMALL, record("c", 0, 10, cached_tokens=11)], FINISHED)
    assert report.population.faulty_count == 1
    assert report.population.prompt_tokens == 145


def test_no_count_at_all_gives_theory_without_realized() -> None:
    records = [r.model_copy(update={"cached_tokens": None}) for r in SMALL]
    report = summarize(header(), records, FINISHED)
    assert report.rate("realized") is None
    assert (report.population.basis, report.chain.end_key) == ("completed", "ready")
    assert sum(s.tokens for s in report.chain.steps) == report.chain.gap_tokens == 96 - 40
    assert report.worst == []


def test_page_size_sources() -> None:
    silent = ServerInfo(base_url="http://127.0.0.1:1", client="openai")
    assumed = summarize(header(server=silent), SMALL, FINISHED)
    assert (assumed.page_size.tokens, assumed.page_size.source) == (1, "assumed")
    assert "--page" in assumed.notes[0]
    other = summarize(header(), SMALL, FINISHED, page_size=20)
    aligned = other.rate("aligned")
    assert aligned is not None
    assert aligned.hit_tokens == 40 + 40
    assert "page size 20" in other.notes[0]
    assert summarize(header(), SMALL, FINISHED).notes == []


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["started"], "incomplete"),
        (["started", "interrupted"], "interrupted"),
        (["started", "server_lost"], "server_lost"),
        (["started", "interrupted", "resumed"], "incomplete"),
        (["started", "server_lost", "resumed", "finished"], "finished"),
    ],
)
def test_how_a_run_ended(kinds: list[str], status: str) -> None:
    events = [RunEvent.model_validate({"at_s": i, "kind": kind, "message": "why"}) for i, kind in enumerate(kinds)]
    done = summarize(header(requests=7), SMALL, events).completeness
    assert (done.status, done.missing) == (status, 3)
    assert done.banner is not None
    assert "3 of 7 planned requests are missing" in done.banner
    assert ("(why)" in done.banner) == (status in ("interrupted", "server_lost"))


def test_dropped_turns_are_no_part_of_planned() -> None:
    drop = RunEvent(at_s=0, kind="dropped", session="a", flow="main", turn=9, requests=1)
    done = summarize(header(), SMALL, [drop, drop, *FINISHED]).completeness
    assert (done.dropped, done.missing, done.banner) == (2, 0, None)


def test_tiers() -> None:
    tiered = record("c", 0, 100, lcp=90, cached_tokens=90, cached_device=60, cached_host=20, cached_storage=0)
    tiers = summarize(header(), [*SMALL, tiered], FINISHED).tiers
    assert tiers is not None
    assert (tiers.requests, tiers.device, tiers.host, tiers.unsplit) == (1, 60, 20, 10 + 50)
    assert summarize(header(), SMALL, FINISHED).tiers is None


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no recorded request"),
        ([SMALL[3]], "all 1 recorded requests failed.*1 x timeout.*no answer in 60 s"),
        ([SMALL[0], SMALL[0]], "session a, flow main, turn 0: recorded twice"),
        ([record("a", 0, 0)], "field 'prompt_tokens'"),
        ([record("a", 0, 5, ready_lcp=-1)], "field 'ready_lcp': negative"),
        ([record("a", 0, 5, done_s=float("nan"))], "field 'done_s': not a finite number"),
    ],
)
def test_what_cannot_be_reported(records: list[RequestRecord], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        summarize(header(), records, FINISHED)


def test_records_out_of_order_are_noted() -> None:
    odd = record("c", 0, 100, session_output_lcp=20, session_lcp=30, shared_output_lcp=40)
    [note] = summarize(header(), [*SMALL, odd], FINISHED).notes
    assert "session c, flow main, turn 0" in note


@st.composite
def ordered_records(draw: st.DrawFn) -> list[RequestRecord]:
    """Any mix of failed, uncounted and counted requests whose prefix lengths are in order."""
    records = []
    for turn in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, 400))
        shared = draw(st.integers(0, prompt + 20))
        records.append(
            record(
                draw(st.sampled_from("abc")),
                turn,
                prompt,
                shared_output_lcp=shared,
                ready_lcp=draw(st.integers(0, shared)),
                cached_tokens=draw(st.none() | st.integers(0, prompt)),
                error=draw(st.none() | st.just(RequestError(kind="http", message="503"))),
            )
        )
    records[0] = records[0].model_copy(update={"error": None})
    return records


@given(ordered_records(), st.integers(1, 130))
def test_steps_sum_exactly_to_the_gap(records: list[RequestRecord], page: int) -> None:
    report = summarize(header(), records, FINISHED, page_size=page)
    chain = report.chain
    assert sum(s.tokens for s in chain.steps) == chain.gap_tokens == chain.ideal_tokens - chain.end_tokens
    assert all(s.tokens == s.lost_tokens - s.gained_tokens for s in chain.steps)
    assert all(s.gained_tokens == 0 for s in chain.steps[:2])
    ideal, aligned, ready = report.rates[:3]
    assert ideal.hit_tokens >= aligned.hit_tokens >= ready.hit_tokens
    assert ideal.hit_tokens == chain.ideal_tokens
    if report.rate("realized") is not None:
        assert sum(s.gap_tokens or 0 for s in report.sessions) == chain.gap_tokens - chain.steps[0].tokens
    assert sum(s.prompt_tokens for s in report.sessions) == report.population.prompt_tokens
    assert report.population.requests + report.population.failed <= len(records)


def test_every_definition_has_its_own_text() -> None:
    levels = [*d.THEORY, d.REALIZED]
    texts = [d.definition(level.tokens) for level in levels]
    assert all(texts)
    assert len(set(texts)) == len({level.key for level in levels}) == len(levels)


def test_attribution_without_events_by_hand() -> None:
    """Request a/1 hits 20 of 40: 10 had not been computed when it was sent, 10 had; b/0 hits more than was ready."""
    why = summarize(header(), SMALL, FINISHED).attribution
    assert why is not None
    assert {row.cause: row.tokens for row in why.causes} == {
        "page_alignment": 7 + 9,
        "in_flight": 10 + 10,
        "not_observed": 10,
        "unexplained": 0,
    }
    assert (why.gap_tokens, why.ideal_tokens, why.evidence.kind) == (46, 96, "none")
    assert [(row.session, row.gap_tokens) for row in why.by_session] == [("a", 27), ("b", 19)]
    assert [sum(row.causes.values()) for row in why.by_depth] == [46]


def test_context_changes_are_apart() -> None:
    """Turn 1 drops the last 12 tokens of turn 0 (an edit), turn 2 is shorter than turn 1 (a compaction)."""
    records = [
        record("a", 0, 40),
        record("a", 1, 60, lcp=28),
        record("a", 2, 30, lcp=20),
        record("a", 3, 90, lcp=30),
    ]
    why = summarize(header(), records, FINISHED).attribution
    assert why is not None
    changes = why.context_changes
    assert (changes.edits, changes.compactions, changes.dropped_tokens) == (1, 1, 12 + 40)
    assert [(c.turn, c.kind, c.at_token, c.dropped_tokens) for c in changes.largest] == [
        (2, "compaction", 20, 40),
        (1, "edit", 28, 12),
    ]


def test_events_that_never_came_are_no_evidence() -> None:
    from traces.replay.events import EventHeader, KvEvents

    silent = KvEvents(EventHeader(header=1, endpoint="tcp://x:1", page_size=10, pair_keys=False, emptied=False))
    why = summarize(header(), SMALL, FINISHED, kv_events=silent).attribution
    bare = summarize(header(), SMALL, FINISHED).attribution
    assert why is not None
    assert bare is not None
    assert why.evidence.kind == "none"
    assert "none came from tcp://x:1" in why.evidence.text
    assert why.causes == bare.causes
