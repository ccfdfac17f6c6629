"""What the simulator says of a live run, request by request, and why the two differ where they do. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eval.bench.prediction_workload import Played
from radix_cache.simulator.recorded import FINISH, START, Recorded, play, play_steps


@dataclass(frozen=True)
class Difference:
    """A request with other cached tokens than predicted.

    ``why``: ``memory``: one page of one victim, since servers free memory step by step and the simulator at once;
    ``follows``: an earlier request of the conversation differed, so its prefix was another when this one came;
    ``overlap``: other requests ran at its start, and which of them held what is the server's affair;
    ``order``: none of these.
    """

    session: str
    flow: str
    turn: int
    live: int
    predicted: int
    why: str


@dataclass(frozen=True)
class Prediction:
    """Live and predicted; rates 0..1 over prompt tokens.

    Attributes:
        same: share of requests with the same cached tokens.
        refused: requests that found no memory in the simulator though they ran.
        overlapping: requests at whose start another one ran.
    """

    requests: int
    live_rate: float
    predicted_rate: float
    same: float
    refused: int
    overlapping: int
    live_evicted: int | None
    predicted_evicted: int
    reasons: dict[str, int]
    differences: list[Difference] = field(repr=False)

    @property
    def points_off(self) -> float:
        """Predicted less live rate, in percentage points."""
        return 100 * (self.predicted_rate - self.live_rate)


def compare(
    played: Played, *, policy: str, capacity: int, truncate: bool = True, live_evicted: int | None = None
) -> Prediction:
    """Play the run's own events on the simulator and hold the result against what the server reported.

    Where the server wrote down its steps, these are played, else only when requests started and ended.

    Args:
        played: the run, see ``prediction_workload``.
        policy: eviction policy of the server.
        capacity: of its cache, in tokens, as it reports it.
        truncate: whether its last victim loses only what is needed.
        live_evicted: tokens that it evicted; None: not known.
    """
    said = _said(played, policy, capacity, truncate)
    live = np.array([one.record.cached_tokens or 0 for one in played.sent])
    prompts = sum(len(one.prompt) for one in played.sent)
    busy = _running_at_start(played)
    differences = _differences(played, live, said.hit, busy)
    return Prediction(
        requests=len(played.sent),
        live_rate=float(live.sum() / prompts),
        predicted_rate=float(said.hit.sum() / prompts),
        same=1 - len(differences) / len(played.sent),
        refused=said.refused,
        overlapping=int((busy > 0).sum()),
        live_evicted=live_evicted,
        predicted_evicted=said.evicted,
        reasons=dict(Counter(difference.why for difference in differences)),
        differences=differences,
    )


def _said(played: Played, policy: str, capacity: int, truncate: bool) -> Recorded:
    if played.steps is not None:
        return play_steps(played.workload, played.steps, policy=policy, capacity=capacity, truncate=truncate)
    return play(
        played.workload,
        played.events,
        policy=policy,
        capacity=capacity,
        truncate=truncate,
        held_pages=played.held_pages,
    )


def _differences(
    played: Played, live: npt.NDArray[np.int64], predicted: npt.NDArray[np.int32], busy: npt.NDArray[np.int64]
) -> list[Difference]:
    found = []
    changed: set[tuple[str, str]] = set()
    for number in _by_start(played):
        record = played.sent[number].record
        flow = (record.session, record.flow)
        off = int(predicted[number]) - int(live[number])
        if off == 0:
            changed.discard(flow)
            continue
        if flow in changed:
            why = "follows"
        elif abs(off) <= played.workload.page_size:
            why = "memory"
        else:
            why = "overlap" if busy[number] else "order"
        changed.add(flow)
        found.append(Difference(*flow, record.turn, int(live[number]), int(predicted[number]), why))
    return found


def _by_start(played: Played) -> list[int]:
    events = np.sort(played.events, order="time", kind="stable")
    return [int(which) for which in events["which"][events["kind"] == START]]


def _running_at_start(played: Played) -> npt.NDArray[np.int64]:
    """How many other requests ran when each one started."""
    busy = np.zeros(len(played.sent), dtype=np.int64)
    running = 0
    for event in np.sort(played.events, order="time", kind="stable"):
        if event["kind"] == START:
            busy[event["which"]] = running
            running += 1
        elif event["kind"] == FINISH:
            running -= 1
    return busy
