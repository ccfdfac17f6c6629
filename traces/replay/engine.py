"""The closed loop: N sessions at once, each turn sent when its flow is ready for it.

One asyncio task per active session and flow. Within a flow the order is fixed; between flows it follows from the
server's timing and the think times only. All times are real: nothing here simulates a clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal

from traces.model import Flow, Session, Turn
from traces.replay.clients.base import Call, Client, Outcome, conversation_name
from traces.replay.clients.chat import Conversation
from traces.replay.given import GivenBook, GivenPrompts
from traces.replay.judge import digest_of, fault_of, output_of
from traces.replay.ledger import Prefixes, PrefixLedger, Tokens
from traces.replay.rebuild import sends_and_ends
from traces.replay.record import RequestError, RequestRecord, RunEvent
from traces.replay.schedule import Think, joined_flows, recorded_think_s, spawning_turn
from traces.replay.store import Output, RunWriter, TurnKey, key_of
from traces.replay.tally import Tally
from traces.tokens import TokenBook

Status = Literal["finished", "interrupted", "server_lost"]

# A server counts as lost after this many failed probes with this pause between them.
PROBES, PROBE_PAUSE_S = 3, 0.5


@dataclass(frozen=True, slots=True)
class Rules:
    """What the engine needs to know of the settings."""

    concurrency: int
    think: Think
    history: Literal["recorded", "own"]
    sharing: Literal["session", "tools+system"]
    seed: int
    vocab: tuple[int, int]
    in_flight: int | None = None  # requests sent and not yet answered, at most


@dataclass(slots=True)
class _Active:
    """A session that is being replayed."""

    session: Session
    book: TokenBook | GivenBook
    main_ended: list[asyncio.Future[float]]  # by position of the main turn
    flow_ended: dict[str, asyncio.Future[float]]
    conversations: dict[str, Conversation]
    # Text of each flow's last answer, for own history through a text protocol.
    answers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _InFlight:
    """A request that was sent; times in seconds of the run's clock."""

    session: Session
    flow: Flow
    turn: Turn
    call: Call
    prefixes: Prefixes
    ready_s: float
    think_s: float
    sent_s: float
    first_token_s: float | None = None


def ignore_record(record: RequestRecord, prompt: Tokens, output: Tokens | None) -> None:
    """What ``Engine`` calls for each record where nobody wants to see its tokens."""


OnRecord = Callable[[RequestRecord, Tokens, Tokens | None], None]


class Engine:
    """Replays sessions through one client. Use once."""

    def __init__(
        self,
        client: Client,
        writer: RunWriter,
        rules: Rules,
        tally: Tally,
        clock: Callable[[], float],
        on_progress: Callable[[Tally], None],
        on_record: OnRecord = ignore_record,
        given: GivenPrompts | None = None,
    ) -> None:
        """``clock`` gives seconds since the run started, on a monotonic clock; ``on_record`` sees each request's tokens
        when it has ended; ``given`` has the prompts where they are not made from block ids."""
        self._client = client
        self._writer = writer
        self._rules = rules
        self._tally = tally
        self._clock = clock
        self._on_progress = on_progress
        self._on_record = on_record
        self._given = given
        self._ledger = PrefixLedger()
        self._done: Mapping[TurnKey, RequestRecord] = {}
        self._resumed: dict[str, _Active] = {}
        # Turns that are ready take their places in the order in which they became ready.
        self._places = nullcontext() if rules.in_flight is None else asyncio.Semaphore(rules.in_flight)
        self._workers: list[asyncio.Task[None]] = []
        self._probing: asyncio.Task[bool] | None = None
        self._stopped: Status | None = None
        self.interrupted_requests = 0

    async def run(self, sessions: Iterable[Session]) -> Status:
        """Replay the sessions, in this order, until all are done or the run is stopped."""
        waiting = deque(s for s in sessions if not all((s.id, f.name, t.index) in self._done for f, t in _turns(s)))
        self._tally.sessions_done = self._tally.sessions_total - len(waiting)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._rules.concurrency, len(waiting))):
                self._workers.append(group.create_task(self._work(waiting)))
        return self._stopped or "finished"

    def interrupt(self) -> None:
        """Stop now: requests in flight are aborted and leave no record."""
        self._stop("interrupted")

    def restore(
        self,
        sessions: Iterable[Session],
        done: Mapping[TurnKey, RequestRecord],
        outputs: Mapping[TurnKey, Output],
    ) -> None:
        """Take up where an earlier process stopped: rebuild what it had sent, from records and outputs.

        Prompts are built in the order in which they were sent, because with ``own`` history that order decides
        which answers they contain.
        """
        self._done = done
        by_id = {session.id: session for session in sessions}
        built: dict[TurnKey, Tokens] = {}
        for record, is_end in sends_and_ends(done.values()):
            key = key_of(record)
            session = by_id[record.session]
            if record.session not in self._resumed:
                self._resumed[record.session] = self._activate(session)
            active = self._resumed[record.session]
            flow = next(flow for flow in session.flows() if flow.name == record.flow)
            position = next(k for k, turn in enumerate(flow.turns) if turn.index == record.turn)
            if not is_end:
                built[key], _ = self._build(active, flow, position)
                self._ledger.sent(session.id, built[key])
                continue
            prompt, output = built.pop(key), outputs.get(key)
            if record.first_token_s is not None:
                self._ledger.first_token(prompt)
            self._ledger.ended(session.id, prompt, None if isinstance(output, str) else output)
            self._learn(active, flow, position, output, failed=record.error is not None)
        for record in done.values():
            self._tally.add(record)
        open_sessions = {s.id for s in by_id.values() if any((s.id, f.name, t.index) not in done for f, t in _turns(s))}
        for finished in self._resumed.keys() - open_sessions:
            del self._resumed[finished]
            self._ledger.forget(finished)

    async def _work(self, waiting: deque[Session]) -> None:
        while waiting and self._stopped is None:
            session = waiting.popleft()
            self._tally.sessions_running += 1
            self._on_progress(self._tally)
            try:
                resumed = self._resumed.pop(session.id) if session.id in self._resumed else None
                await self._replay(resumed or self._activate(session))
                await self._end(session)
            finally:
                self._tally.sessions_running -= 1
            self._ledger.forget(session.id)
            self._tally.sessions_done += 1
            self._on_progress(self._tally)

    def _activate(self, session: Session) -> _Active:
        rules = self._rules
        # Text protocols tell no token ids: there the answer enters the history as text, not as tokens.
        history = "recorded" if self._client.uses_messages else rules.history
        book: TokenBook | GivenBook
        if self._given is not None:
            book = GivenBook(session, self._given.tokens)
        else:
            book = TokenBook(session, seed=rules.seed, vocab=rules.vocab, prefix_sharing=rules.sharing, history=history)
        conversations = {f.name: Conversation(f.tool_tokens + f.system_tokens) for f in session.flows()}
        return _Active(session, book, [], {}, conversations)

    async def _replay(self, active: _Active) -> None:
        loop = asyncio.get_running_loop()
        session = active.session
        active.main_ended = [loop.create_future() for _ in session.main.turns]
        active.flow_ended = {flow.name: loop.create_future() for flow in session.flows()}
        started = self._clock()
        async with asyncio.TaskGroup() as group:
            for flow in session.flows():
                group.create_task(self._flow(active, flow, started))

    async def _flow(self, active: _Active, flow: Flow, started: float) -> None:
        session = active.session
        is_main = flow is session.main
        spawner = spawning_turn(session, flow)
        ended = started if spawner is None else await active.main_ended[spawner]
        for position, turn in enumerate(flow.turns):
            earlier = self._done.get((session.id, flow.name, turn.index))
            if earlier is not None:
                ended = earlier.done_s
            else:
                think = self._rules.think.wait_s(recorded_think_s(session, flow, position))
                ready = ended + think
                if is_main:
                    # The recorded think time already spans the subagent's run, so the two do not add up.
                    for joined in joined_flows(session, position):
                        ready = max(ready, await active.flow_ended[joined.name])
                await asyncio.sleep(max(0.0, ready - self._clock()))
                async with self._places:
                    ended = await self._request(active, flow, position, ready, think)
            if is_main:
                active.main_ended[position].set_result(ended)
        if not is_main:
            await self._end(session, flow.name)
        active.flow_ended[flow.name].set_result(ended)

    async def _end(self, session: Session, flow: str | None = None) -> None:
        """Tell a server whose policies ask for it that a session or a subagent is over."""
        if not self._client.names_sessions:
            return
        fault = await self._client.end(conversation_name(session.id, flow))
        kind: Literal["ended", "end_failed"] = "end_failed" if fault else "ended"
        self._writer.event(RunEvent(at_s=self._clock(), kind=kind, session=session.id, flow=flow, message=fault or ""))

    def _build(self, active: _Active, flow: Flow, position: int) -> tuple[Tokens, Call]:
        turn = flow.turns[position]
        prompt = active.book.prompt(flow.name, position)
        messages: tuple[dict[str, str], ...] = ()
        if self._client.uses_messages:
            answered = max(1, flow.turns[position - 1].output_tokens) if position else 0
            messages = active.conversations[flow.name].messages(
                prompt, answer_tokens=answered, answer_text=active.answers.get(flow.name)
            )
        name, wanted = conversation_name(active.session.id, flow.name), max(1, turn.output_tokens)
        return prompt, Call(prompt, wanted, messages, name, turn.stop.value)

    def _learn(self, active: _Active, flow: Flow, position: int, output: Output | None, *, failed: bool) -> None:
        """Make a server's answer part of the history, if that is wanted."""
        active.answers.pop(flow.name, None)
        if self._rules.history == "recorded" or failed or output is None:
            return
        if isinstance(output, str):
            active.answers[flow.name] = output
        else:
            active.book.record_output(flow.name, position, output)

    async def _request(self, active: _Active, flow: Flow, position: int, ready: float, think: float) -> float:
        """Send one turn, write its record, return when it ended."""
        prompt, call = self._build(active, flow, position)
        prefixes = self._ledger.sent(active.session.id, prompt)
        request = _InFlight(active.session, flow, flow.turns[position], call, prefixes, ready, think, self._clock())

        def on_first_token() -> None:
            request.first_token_s = self._clock()
            self._ledger.first_token(prompt)

        self._tally.in_flight += 1
        try:
            outcome = await self._client.generate(call, on_first_token)
        except asyncio.CancelledError:
            if self._stopped == "server_lost":
                error = RequestError(kind="connection", message="the server was lost while this request ran")
                self._write(request, Outcome(error=error))
            else:
                self.interrupted_requests += 1
            raise
        finally:
            self._tally.in_flight -= 1
        if outcome.error is None:
            outcome.error = fault_of(outcome, call, self._client)
        self._ledger.ended(active.session.id, prompt, outcome.output_ids)
        self._learn(active, flow, position, output_of(outcome), failed=outcome.error is not None)
        ended = self._write(request, outcome)
        if outcome.error is not None and outcome.error.kind in ("connection", "timeout") and not await self._alive():
            self._stop("server_lost")
            # Cancellation reaches this task through its session; until then it must not send its next turn.
            await asyncio.get_running_loop().create_future()
        return ended

    def _write(self, request: _InFlight, outcome: Outcome) -> float:
        ended = self._clock()
        output = output_of(outcome)
        record = RequestRecord(
            session=request.session.id,
            flow=request.flow.name,
            turn=request.turn.index,
            ready_s=request.ready_s,
            sent_s=request.sent_s,
            first_token_s=request.first_token_s,
            done_s=ended,
            think_s=request.think_s,
            prompt_tokens=len(request.call.prompt),
            prompt_tokens_reported=outcome.prompt_tokens,
            output_tokens_wanted=request.call.max_tokens,
            output_tokens=outcome.output_tokens,
            output_sha256=digest_of(output),
            cached_tokens=outcome.cached_tokens,
            cached_device=outcome.cached_device,
            cached_host=outcome.cached_host,
            cached_storage=outcome.cached_storage,
            offload=outcome.offload,
            held_s=outcome.held_s,
            queued_s=outcome.queued_s,
            accepted_drafts=outcome.accepted_drafts,
            recorded_stop=request.turn.stop.value,
            finish_reason=outcome.finish_reason,
            error=outcome.error,
            **request.prefixes._asdict(),
        )
        self._writer.record(record, output)
        self._on_record(record, request.call.prompt, outcome.output_ids)
        self._tally.add(record)
        self._on_progress(self._tally)
        return ended

    async def _alive(self) -> bool:
        """Probe the server; requests that fail together share the probes."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._probe())
        return await asyncio.shield(self._probing)

    async def _probe(self) -> bool:
        for attempt in range(PROBES):
            if attempt:
                await asyncio.sleep(PROBE_PAUSE_S)
            if await self._client.alive():
                return True
        return False

    def _stop(self, status: Status) -> None:
        if self._stopped is not None:
            return
        self._stopped = status
        if status == "server_lost":
            message = f"no answer to {PROBES} probes; {self._tally.in_flight} other requests were in flight"
            self._writer.event(RunEvent(at_s=self._clock(), kind="server_lost", message=message))
        for worker in self._workers:
            worker.cancel()


def _turns(session: Session) -> Iterable[tuple[Flow, Turn]]:
    return ((flow, turn) for flow in session.flows() for turn in flow.turns)
