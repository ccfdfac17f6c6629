"""Who continues what, and who may start: the session table and the gate, without SGLang."""

from __future__ import annotations

import random
import sys

import pytest

from agentserve.runtime.policy_gate import Gate
from agentserve.runtime.policy_sessions import Flow, SessionTable
from agentserve.runtime.policy_settings import PolicySettings, settings_from
from radix_cache.admission import admission_policy
from radix_cache.features import FlowState, Stop
from radix_cache.gaps import GapTable, gap_row

PAGE = 16
HEAD = list(range(64))  # tools and system prompt, the same for all


class Clients:
    """Requests against one table."""

    def __init__(self, **options: float) -> None:
        self.gaps = GapTable()
        self.table = SessionTable(self.gaps, PAGE, **options)  # type: ignore[arg-type]
        self.sent = 0

    def send(self, prompt: list[int], now: float, name: str | None = None, *, done: bool = True) -> Flow:
        self.sent += 1
        flow = self.table.arrive(str(self.sent), prompt, name, now)
        if done:
            self.table.finish(flow, str(self.sent), Stop.TOOL, len(prompt) + 5, now)
        return flow


def words(seed: int, count: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 1000) for _ in range(count)]


def test_a_longer_prompt_continues_and_another_one_does_not() -> None:
    c = Clients()
    a = c.send(HEAD + words(1), 0)
    b = c.send(HEAD + words(2), 1)
    assert a is not b
    assert c.send(HEAD + words(1) + words(3), 2) is a
    assert c.send(HEAD + words(2) + words(3), 3) is b
    assert c.send(HEAD, 4) not in (a, b), "the common head is nobody's prompt"


def test_prompts_that_differ_within_their_last_page_are_two_conversations() -> None:
    c = Clients()
    a, b = c.send([*HEAD, 7], 0), c.send([*HEAD, 8], 1)
    assert a is not b
    assert c.send([*HEAD, 7, *words(1)], 2) is a
    assert c.send([*HEAD, 8, *words(1)], 3) is b


def test_a_rolled_back_conversation_is_recognized_by_an_earlier_prompt() -> None:
    c = Clients()
    first = HEAD + words(1)
    a = c.send(first, 0)
    c.send(first + words(2), 1)
    c.send(first + words(2) + words(3), 2)
    assert c.send(first + words(4), 3) is a


def test_a_conversation_has_one_request_at_a_time() -> None:
    c = Clients(silence_s=100.0)
    a = c.send(HEAD + words(1), 0, done=False)
    assert c.send(HEAD + words(1) + words(2), 1) is not a
    late = Clients(silence_s=100.0)
    lost = late.send(HEAD + words(1), 0, done=False)  # aborted: its end is never seen
    assert late.send(HEAD + words(1) + words(2), 101) is lost


def test_other_salts_share_no_conversation() -> None:
    table = SessionTable(GapTable(), PAGE)
    a = table.arrive("1", HEAD + words(1), None, 0, salt="x")
    table.finish(a, "1", Stop.TOOL, 100, 0)
    assert table.arrive("2", HEAD + words(1) + words(2), None, 1, salt="y") is not a


def test_names_lead_to_sessions_and_flows() -> None:
    c = Clients()
    main = c.send(HEAD + words(1), 0, "s")
    side = c.send(words(9), 1, "s")
    sub = c.send(words(8), 2, "s/sub")
    assert len({main, side, sub}) == 3
    assert {f.session.id for f in (main, side, sub)} == {"s"}
    assert c.send(HEAD + words(1) + words(2), 3, "s") is main
    assert c.send(words(7), 4, "s/sub") is sub, "a named flow may go anywhere"
    assert c.table.end("s/sub") == [sub]
    assert {f.state for f in (main, side)} == {FlowState.LIVE}
    assert set(c.table.end("s")) == {main, side}
    assert c.table.end("s") == []


def test_gaps_are_learned_by_stop_reason_and_never_negative() -> None:
    c = Clients()
    c.send(HEAD + words(1), 10.0)
    before = c.gaps.counts.sum()
    c.send(HEAD + words(1) + words(2), 9.0)  # a clock that was set back
    assert c.gaps.counts.sum() == before + 1
    assert c.gaps.counts[gap_row(Stop.TOOL, -1.0), 0] > 1


def test_the_table_is_bounded_whatever_clients_send() -> None:
    c = Clients(limit=50)
    for i in range(3000):
        c.send([i, *words(i)], float(i), None if i % 3 else f"session-{i}", done=i % 2 == 0)
        c.send([i], float(i))  # shorter than a page, as health checks are
    table = c.table
    assert len(table) == 50
    assert len(list(table.sessions())) == 50
    assert len(table._marks) <= 50 * 8
    assert sum(table._page_counts.values()) == sum(len(f.marks) for f in table._flows.values())
    assert sys.getsizeof(table._sessions) < 50_000


def gate(c: Clients, spec: str, capacity: int = 1000) -> Gate:
    return Gate(admission_policy(spec), c.table, capacity)


def test_a_gate_holds_new_sessions_until_there_is_room() -> None:
    c = Clients()
    g = gate(c, "gate:0.5")
    a = c.send(words(1, 600), 0, "a", done=False)
    assert g.decide([("1", a)], 0).passed == [True], "alone, however large"
    c.table.finish(a, "1", Stop.TOOL, 600, 1)
    b, d = c.send(words(2, 100), 2, "b", done=False), c.send(words(3, 100), 2, "d", done=False)
    decision = g.decide([("2", b), ("3", d)], 2)
    assert (decision.passed, decision.sessions_waiting) == ([False, False], 2)
    a2 = c.send(words(1, 600) + words(4), 3, "a", done=False)
    assert a2 is a
    assert g.decide([("2", b), ("3", d), ("4", a)], 3).passed == [False, False, True], "what runs goes on"
    c.table.end("a")
    assert g.decide([("2", b), ("3", d)], 4).passed == [True, True]


def test_new_sessions_start_in_order_of_arrival() -> None:
    c = Clients()
    g = Gate(admission_policy("gate:0.5"), c.table, 1000)
    a = c.send(words(1, 450), 0, "a", done=False)
    assert g.decide([("1", a)], 0).passed == [True]
    big, small = c.send(words(2, 900), 1, "big", done=False), c.send(words(3, 20), 1, "small", done=False)
    assert g.decide([("2", big), ("3", small)], 1).passed == [True, False]


def test_a_session_that_fell_silent_holds_nobody_up() -> None:
    c = Clients(silence_s=60.0)
    g = gate(c, "gate:0.5")
    a = c.send(words(1, 600), 0, "a")
    g.decide([("1", a)], 0)
    b = c.send(words(2, 100), 59, "b", done=False)
    assert g.decide([("2", b)], 59).passed == [False]
    assert g.decide([("2", b)], 61).passed == [True]


def test_parking_takes_the_newest_and_gives_back_the_oldest_first() -> None:
    c = Clients()
    g = gate(c, "parking:1.0")
    flows = {}
    for number, name in enumerate("abc"):
        flows[name] = c.send(words(number, 400), number, name, done=False)
        assert g.decide([(str(c.sent), flows[name])], number).passed == [True]
        c.table.finish(flows[name], str(c.sent), Stop.TOOL, 400, number)
    again = [(f"again-{name}", flows[name]) for name in "cba"]
    decision = g.decide(again, 5)
    assert decision.passed == [False, True, True]
    assert decision.changed == [flows["c"]]
    assert (flows["c"].state, decision.sessions_parked) == (FlowState.PARKED, 1)
    c.table.end("a")
    decision = g.decide([("again-c", flows["c"])], 6)
    assert decision.passed == [True]
    assert flows["c"].state == FlowState.LIVE


def test_settings_travel_through_the_environment() -> None:
    settings = PolicySettings("ttl:handicap=30", "gate:0.9", False)
    settings.check()
    assert settings_from(settings.environment()) == settings
    assert settings_from({}) is None
    for wrong, message in ((("belady", "none"), "simulate"), (("lru2", "none"), "lru"), (("lru", "door"), "gate")):
        with pytest.raises(ValueError, match=message):
            PolicySettings(*wrong).check()
