"""What of a conversation is worth storing, and when that is decided; a server does so in test_offload_together."""

from __future__ import annotations

import pytest

from offload.deferred import Deferred, DeferredStores
from radix_cache.admission.host import PathNode, Worth, worth_storing
from radix_cache.features import FlowState

LIVE, PARKED, ENDED = FlowState.LIVE, FlowState.PARKED, FlowState.ENDED


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([], (0, "")),
        ([(512, False, False, LIVE)], (512, "")),
        ([(512, False, False, PARKED)], (512, "")),
        ([(512, False, False, ENDED)], (0, "ended")),
        ([(512, False, True, LIVE)], (0, "superseded")),
        ([(512, False, True, ENDED)], (0, "superseded")),
        # Of a conversation that is over, what others share stays worth it, whoever used it last.
        ([(512, True, False, ENDED), (900, False, False, ENDED)], (512, "ended")),
        ([(512, True, False, LIVE), (700, False, False, LIVE), (900, False, True, LIVE)], (700, "superseded")),
        # A node that is worth it needs all that is before it.
        ([(512, False, True, LIVE), (900, True, False, ENDED)], (900, "")),
    ],
)
def test_what_is_worth_storing(path: list[tuple[int, bool, bool, FlowState]], expected: tuple[int, str]) -> None:
    assert worth_storing([PathNode(*node) for node in path]) == Worth(*expected)  # type: ignore[arg-type]


def item(request: str, tokens: list[int], flow: str = "f") -> Deferred:
    return Deferred(request, flow, tokens, 0, None, (None, None))


def test_a_store_is_decided_a_moment_after_its_request_ended() -> None:
    waiting = DeferredStores(1.0)
    waiting.put(item("a", [1, 2]))
    assert not waiting.due(1e9)  # still runs, however long
    waiting.released("a", 10.0)
    waiting.released("unknown", 10.0)
    assert not waiting.due(10.9)
    assert [found.request for found in waiting.due(11.0)] == ["a"]
    assert not len(waiting)


def test_a_longer_prefix_of_the_flow_takes_the_place_of_a_shorter_one() -> None:
    waiting = DeferredStores(1.0)
    waiting.put(item("first", [1, 2]))
    waiting.released("first", 0.0)
    waiting.put(item("second", [1, 2, 3]))
    assert not waiting.due(5.0)  # the first one's tokens are in the second, which runs
    waiting.put(item("branch", [1, 9]))  # no prefix of the other: both are decided
    waiting.put(item("other", [1, 2, 3, 4], flow="g"))
    for request in ("second", "branch", "other"):
        waiting.released(request, 5.0)
    assert [found.request for found in waiting.due(6.0)] == ["second", "branch", "other"]


def test_a_request_that_goes_on_waits_again() -> None:
    waiting = DeferredStores(1.0)
    waiting.put(item("a", [1, 2]))
    waiting.released("a", 0.0)  # retracted
    waiting.put(item("a", [1, 2, 3]))
    assert not waiting.due(5.0)
    waiting.released("a", 5.0)
    assert [found.tokens for found in waiting.due(6.0)] == [[1, 2, 3]]
    waiting.put(item("b", [1]))
    waiting.clear()
    waiting.released("b", 6.0)
    assert not waiting.due(9.0)


def test_after_something_was_evicted_before_its_decision_nothing_waits_for_a_while() -> None:
    waiting = DeferredStores(1.0, hurry_s=60.0)
    waiting.put(item("a", [1]))
    waiting.put(item("b", [2], flow="g"))
    waiting.put(item("c", [3], flow="h"))
    waiting.released("a", now=5.0)
    waiting.released("b", now=5.5)
    assert [one.request for one in waiting.due(6.0)] == ["a"]
    waiting.lost(now=6.0)
    assert [one.request for one in waiting.due(6.0)] == ["b"]  # c still runs
    waiting.released("c", now=7.0)
    assert [one.request for one in waiting.due(7.0)] == ["c"]
    waiting.put(item("d", [4]))
    waiting.released("d", now=66.0)
    assert not waiting.due(66.5)
    assert [one.request for one in waiting.due(67.0)] == ["d"]
