"""Who a request belongs to, and what is known of every conversation: a bounded table, without SGLang.

A *flow* is one line of turns, a *session* one or more flows that live and end together. A request may name its
session (``SESSION``) or also its flow (``SESSION/FLOW``); what it does not name is inferred: a prompt that repeats a
flow's earlier prompt and adds to it continues that flow. So a side request under a session's id does not look like
the conversation having gone another way. Prompts are remembered as digests: a flow is recognized after its prefix
was evicted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radix_cache.features import FlowState, Stop
from radix_cache.gaps import AGE_EDGES, GapTable, age_bin, gap_row, new_pace

MARKS = 8  # prompts remembered per flow: a conversation that was rolled back further looks new
TOKEN_BYTES = array("q").itemsize

STOPS = {"tool_use": Stop.TOOL, "tool_calls": Stop.TOOL, "end_turn": Stop.TURN, "stop": Stop.TURN}


class Mark(NamedTuple):
    """A prompt as it is recognized again."""

    pages: int  # full pages of it
    page_digest: bytes  # of those pages
    tokens: int
    digest: bytes  # of the whole prompt


@dataclass(slots=True, eq=False)
class Session:
    """Flows that are admitted, parked and ended together.

    Attributes:
        number: seniority, smaller is older; set when the session starts.
        started: its first request was let through.
    """

    id: str
    flows: list[Flow] = field(default_factory=list)
    number: int = 0
    started: bool = False
    parked: bool = False

    @property
    def context(self) -> int:
        """Tokens of its flows that have not ended."""
        return sum(flow.context for flow in self.flows if flow.state != FlowState.ENDED)


@dataclass(slots=True, eq=False)
class Flow:
    """One line of turns.

    Attributes:
        stop: why its last answer ended.
        pace: mean of its gaps so far, see ``radix_cache.gaps``.
        context: tokens of its newest prompt and answer.
        last_done: end of its last answer in seconds; None before the first.
        seen: last sign of life, in seconds.
        request: id of the request that runs or waits; None between turns.
        tip: node where its newest sequence ends; only the cache reads it.
    """

    id: str
    session: Session
    stop: Stop = Stop.UNKNOWN
    pace: float = -1.0
    state: FlowState = FlowState.LIVE
    context: int = 0
    last_done: float | None = None
    seen: float = 0.0
    request: str | None = None
    tip: Any = None
    marks: deque[Mark] = field(default_factory=lambda: deque(maxlen=MARKS))


class SessionTable:
    """All flows that were seen lately.

    Args:
        gaps: learns every gap between an answer and the next request.
        page_size: tokens per page.
        limit: flows kept; the one unseen for longest is forgotten. About 2 KB each.
        silence_s: seconds after which a flow without a request counts as gone: it holds up no other session, and
            a request of it that never finished no longer keeps the flow from being recognized.
    """

    def __init__(self, gaps: GapTable, page_size: int, *, limit: int = 4096, silence_s: float = 600.0) -> None:
        self._gaps = gaps
        self._page = page_size
        self._limit = limit
        self._silence_s = silence_s
        self._flows: OrderedDict[str, Flow] = OrderedDict()
        self._sessions: dict[str, Session] = {}
        self._marks: dict[tuple[int, bytes], dict[Flow, None]] = {}
        self._page_counts: dict[int, int] = {}  # pages -> marks of that many
        self._numbered = 0
        self.learned = 0  # times that ranks were computed anew

    def __len__(self) -> int:
        return len(self._flows)

    def sessions(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def arrive(self, request: str, prompt: Sequence[int], name: str | None, now: float, *, salt: str = "") -> Flow:
        """The flow of a new request; its gap is learned.

        Args:
            request: the request's id.
            prompt: token ids.
            name: ``SESSION`` or ``SESSION/FLOW`` as the client said; None: infer it.
            now: seconds.
            salt: requests with different salts share no cache and continue no common flow.
        """
        digests = _Digests(prompt, self._page, salt)
        flow = self._named(name, digests, now) if name else self._inferred(digests, now)
        if flow.last_done is not None and flow.request is None:
            gap = now - flow.last_done
            self.learned += self._gaps.observe(gap_row(flow.stop, flow.pace), gap)
            flow.pace = new_pace(flow.pace, age_bin(gap, AGE_EDGES))
        if flow.state == FlowState.ENDED:
            flow.state = FlowState.LIVE  # the client said it was over, and went on
        flow.request = request
        flow.seen = now
        flow.context = max(flow.context, len(prompt)) if flow.last_done is None else len(prompt)
        if name or digests.pages > 0:
            # Else it cannot be found again, and a stream of health checks must not push out what can.
            self._flows[flow.id] = flow
            self._flows.move_to_end(flow.id)
            self._sessions[flow.session.id] = flow.session
            if digests.pages > 0:
                self._remember(flow, digests.mark())
            while len(self._flows) > self._limit:
                self._forget(next(iter(self._flows.values())))
        return flow

    def finish(self, flow: Flow, request: str, stop: Stop, context: int, now: float) -> None:
        """An answer is complete; ``context`` is prompt and answer in tokens."""
        if flow.request == request:
            flow.request = None
        flow.stop = stop
        flow.context = context
        flow.last_done = flow.seen = now

    def end(self, name: str) -> list[Flow]:
        """A session, or one flow of it, is over. Returns the flows whose state changed; unknown names have none."""
        named = self._flows.get(name)
        session = self._sessions.get(name)
        flows = session.flows if session is not None else [named] if named is not None else []
        changed = [flow for flow in flows if flow.state != FlowState.ENDED]
        for flow in changed:
            flow.state = FlowState.ENDED
            flow.request = None
        if session is not None:
            session.started = session.parked = False
        return changed

    def active(self, now: float) -> list[Session]:
        """Started sessions that still count, by seniority."""
        return sorted(
            (s for s in self._sessions.values() if s.started and any(self._counts(f, now) for f in s.flows)),
            key=lambda session: session.number,
        )

    def _counts(self, flow: Flow, now: float) -> bool:
        return flow.state != FlowState.ENDED and now - flow.seen < self._silence_s

    def _named(self, name: str, digests: _Digests, now: float) -> Flow:
        session_id, slash, _ = name.partition("/")
        if slash:
            return self._flows.get(name) or self._new_flow(session_id, name)
        session = self._sessions.get(session_id)
        if session is None:
            return self._new_flow(session_id, f"{session_id}/")
        return self._continued(digests, now, session) or self._new_flow(session_id, self._number(f"{session_id}/~"))

    def _inferred(self, digests: _Digests, now: float) -> Flow:
        known = self._continued(digests, now, None)
        if known is not None:
            return known
        session_id = self._number("~")
        return self._new_flow(session_id, f"{session_id}/")

    def _number(self, prefix: str) -> str:
        self._numbered += 1
        return f"{prefix}{self._numbered}"

    def _new_flow(self, session_id: str, name: str) -> Flow:
        session = self._sessions.get(session_id) or Session(session_id)
        flow = Flow(name, session)
        session.flows.append(flow)
        return flow

    def _continued(self, digests: _Digests, now: float, within: Session | None) -> Flow | None:
        """The flow, of one session or of any, with the longest remembered prompt that this one begins with."""
        best: Flow | None = None
        best_tokens = 0
        for pages in sorted(self._page_counts):
            if pages > digests.pages:
                break
            flows = self._marks.get((pages, digests.of_pages(pages)))
            if flows is None:
                continue
            for flow in flows:
                busy = flow.request is not None and now - flow.seen < self._silence_s
                foreign = flow.state == FlowState.ENDED if within is None else flow.session is not within
                if busy or foreign:
                    continue
                for mark in flow.marks:
                    if (
                        mark.pages == pages
                        and best_tokens <= mark.tokens <= digests.tokens
                        and digests.of_tokens(mark.tokens) == mark.digest
                    ):
                        best, best_tokens = flow, mark.tokens
        return best

    def _remember(self, flow: Flow, mark: Mark) -> None:
        if mark in flow.marks:
            return
        if len(flow.marks) == MARKS:
            self._drop_mark(flow, flow.marks.popleft())
        flow.marks.append(mark)
        self._marks.setdefault((mark.pages, mark.page_digest), {})[flow] = None
        self._page_counts[mark.pages] = self._page_counts.get(mark.pages, 0) + 1

    def _drop_mark(self, flow: Flow, mark: Mark) -> None:
        place = (mark.pages, mark.page_digest)
        if not any((other.pages, other.page_digest) == place for other in flow.marks):
            flows = self._marks[place]
            flows.pop(flow, None)
            if not flows:
                del self._marks[place]
        self._page_counts[mark.pages] -= 1
        if self._page_counts[mark.pages] == 0:
            del self._page_counts[mark.pages]

    def _forget(self, flow: Flow) -> None:
        del self._flows[flow.id]
        while flow.marks:
            self._drop_mark(flow, flow.marks.popleft())
        flow.tip = None
        session = flow.session
        session.flows.remove(flow)
        if not session.flows:
            self._sessions.pop(session.id, None)


class _Digests:
    """Digests of a prompt's prefixes. Whole pages are hashed once, in one pass from short to long."""

    def __init__(self, prompt: Sequence[int], page: int, salt: str) -> None:
        tokens = prompt if isinstance(prompt, array) and prompt.typecode == "q" else array("q", prompt)
        self._bytes = memoryview(tokens).cast("B")
        self._page_bytes = page * TOKEN_BYTES
        self._hash = hashlib.blake2b(salt.encode(), digest_size=16)
        self._pages = 0
        self.tokens = len(tokens)
        self.pages = self.tokens // page

    def of_pages(self, pages: int) -> bytes:
        """Digest of the first ``pages`` pages; not fewer than the last time."""
        self._hash.update(self._bytes[self._pages * self._page_bytes : pages * self._page_bytes])
        self._pages = pages
        return self._hash.digest()

    def of_tokens(self, tokens: int) -> bytes:
        """Digest of the first ``tokens`` tokens; not fewer than the pages hashed so far."""
        longer = self._hash.copy()
        longer.update(self._bytes[self._pages * self._page_bytes : tokens * TOKEN_BYTES])
        return longer.digest()

    def mark(self) -> Mark:
        return Mark(self.pages, self.of_pages(self.pages), self.tokens, self.of_tokens(self.tokens))
