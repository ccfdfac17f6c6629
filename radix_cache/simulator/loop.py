"""Time: closed-loop sessions with think times, a service model, admission. One event queue.

Each of N clients plays one session after the other. A turn is ready when its predecessor's answer is there and the
think time has passed, a main turn that joins subagents not before they ended. Requests start in order of arrival;
one that finds no memory holds up those behind it, as in a server's queue.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from radix_cache.simulator.jit import core, jit
from radix_cache.simulator.layout import NONE, REJECTED, Cache, Floats, Ints, Records
from radix_cache.simulator.serve import arrive, finish, set_state, start

READY, PREFILLED, FINISHED = 0, 1, 2
FIXED, PARALLEL, QUEUED = 0, 1, 2
LIVE, PARKED, ENDED = 0, 1, 2

EVENT = np.dtype([("time", "f8"), ("number", "i8"), ("kind", "i4"), ("request", "i4")], align=True)

LOOP = np.dtype(
    [
        ("clients", "i8"),
        ("service", "i8"),
        ("write_through", "i8"),
        ("think_cap", "f8"),  # seconds
        ("prefill", "f8"),  # tokens per second
        ("decode", "f8"),  # tokens per second and request
        ("restore", "f8"),  # tokens per second from the host tier
        ("events", "i8"),
        ("numbered", "i8"),
        ("waiting_from", "i8"),  # requests in arrival order: waiting[from:to]
        ("waiting_to", "i8"),
        ("prefilling", "i8"),  # 1 while the one prefill of the queued model runs
        ("active", "i8"),
        ("next_session", "i8"),
        ("context", "i8"),  # tokens of all live flows
        ("area", "f8"),  # integral of it over the time that all clients were busy
        ("busy", "f8"),  # that time, in seconds
        ("now", "f8"),
        ("parkings", "i8"),
    ],
    align=True,
)


class Loop(NamedTuple):
    """Everything outside the caches."""

    state: Records  # LOOP, one record
    events: Records  # EVENT, a binary heap
    waiting: Ints
    active: Ints  # sessions by seniority
    order: Ints  # sessions in order of arrival
    free_since: Floats  # for the clients without a session, oldest first
    sessions: Records
    joins: Ints  # by request: flows that must still end
    admit: Any
    go_on: Any


@core
def push(p: Loop, time: float, kind: int, request: int) -> None:
    s = p.state[0]
    at = s.events
    s.events += 1
    number = s.numbered
    s.numbered += 1
    events = p.events
    while at > 0:
        above = (at - 1) // 2
        e = events[above]
        if e.time < time or (e.time == time and e.number < number):
            break
        events[at] = events[above]
        at = above
    events[at].time = time
    events[at].number = number
    events[at].kind = kind
    events[at].request = request


@core
def pop(p: Loop) -> tuple[float, int, int]:
    s = p.state[0]
    events = p.events
    time, kind, request = events[0].time, events[0].kind, events[0].request
    s.events -= 1
    size = s.events
    last_time, last_number = events[size].time, events[size].number
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (
            events[right].time < events[below].time
            or (events[right].time == events[below].time and events[right].number < events[below].number)
        ):
            below = right
        if events[below].time > last_time or (events[below].time == last_time and events[below].number > last_number):
            break
        events[at] = events[below]
        at = below
    events[at] = events[size]
    return time, kind, request


@core
def think(p: Loop, c: Cache, request: int) -> float:
    return float(min(c.requests[request].think, p.state[0].think_cap))


@core
def set_context(p: Loop, c: Cache, flow: int, tokens: int) -> None:
    f = c.flows[flow]
    change = tokens - f.context
    f.context = tokens
    p.sessions[f.session].context += change
    p.state[0].context += change


@core
def set_states(p: Loop, c: Cache, h: Cache, session: int, state: int) -> None:
    """Park a session's live flows, or let them go on."""
    first = p.sessions[session].first_flow
    for flow in range(first, first + p.sessions[session].flows):
        if c.flows[flow].state != ENDED:
            set_state(c, flow, state)
            if p.state[0].write_through != 0:
                set_state(h, flow, state)


@core
def may_go_on(p: Loop, c: Cache, session: int) -> bool:
    """Ask the admission policy whether a started session may send its next request."""
    older = 0
    for k in range(p.state[0].active):
        if p.active[k] == session:
            if k == 0:
                return True
            break
        older += p.sessions[p.active[k]].context
    own = p.sessions[session].context
    return bool(p.go_on(float(older), float(own), float(c.state[0].capacity * c.state[0].page)))


@core
def enqueue(p: Loop, c: Cache, h: Cache, request: int) -> None:
    p.waiting[p.state[0].waiting_to] = request
    p.state[0].waiting_to += 1


@core
def on_ready(p: Loop, c: Cache, h: Cache, request: int) -> None:
    """A request may be sent: learn its gap, then queue it unless its session is to be parked."""
    r = c.requests[request]
    f = c.flows[r.flow]
    if p.joins[request] > 0:
        f.held = request
        return
    now = c.clock[0].now
    c.clock[0].stamp += 1
    c.fates[request].ready = now
    c.fates[request].ready_stamp = c.clock[0].stamp
    if request != f.first:
        arrive(c, request, request - 1)
        if p.state[0].write_through != 0:
            h.clock[0].stamp += 1
            h.fates[request].ready_stamp = h.clock[0].stamp
            arrive(h, request, request - 1)
    session = p.sessions[f.session]
    if session.parked != 0 or not may_go_on(p, c, f.session):
        f.held = request
        if session.parked == 0:
            session.parked = 1
            p.state[0].parkings += 1
            set_states(p, c, h, f.session, PARKED)
        return
    enqueue(p, c, h, request)


@core
def unpark(p: Loop, c: Cache, h: Cache) -> None:
    """Let parked sessions go on, the oldest first."""
    for k in range(p.state[0].active):
        index = p.active[k]
        session = p.sessions[index]
        if session.parked == 0 or not may_go_on(p, c, index):
            continue
        session.parked = 0
        set_states(p, c, h, index, LIVE)
        for flow in range(session.first_flow, session.first_flow + session.flows):
            held = c.flows[flow].held
            if held != NONE and p.joins[held] == 0:
                c.flows[flow].held = NONE
                enqueue(p, c, h, held)


@jit
def admit(p: Loop, c: Cache) -> None:
    """Start sessions on free clients as long as the admission policy lets them."""
    s = p.state[0]
    now = c.clock[0].now
    while s.active < s.clients and s.next_session < len(p.order):
        index = p.order[s.next_session]
        session = p.sessions[index]
        first = c.flows[session.first_flow].first
        own = c.requests[first].prompt
        capacity = float(c.state[0].capacity * c.state[0].page)
        if s.active > 0 and not p.admit(float(s.context), float(own), capacity):
            return
        free = s.clients - s.active
        session.wanted = p.free_since[0]
        for k in range(1, free):
            p.free_since[k - 1] = p.free_since[k]
        session.started = now
        session.live = session.flows
        p.active[s.active] = index
        s.active += 1
        s.next_session += 1
        set_context(p, c, session.first_flow, own)
        for flow in range(session.first_flow, session.first_flow + session.flows):
            if flow == session.first_flow or c.flows[flow].spawn == NONE:
                begin = c.flows[flow].first
                push(p, now + think(p, c, begin), READY, begin)


@core
def dispatch(p: Loop, c: Cache, h: Cache) -> None:
    """Start waiting requests, first come first served."""
    s = p.state[0]
    now = c.clock[0].now
    while s.waiting_from < s.waiting_to and not (s.service == QUEUED and s.prefilling != 0):
        request = p.waiting[s.waiting_from]
        r = c.requests[request]
        before = c.flows[r.flow].context
        if not start(c, request):
            return
        s.waiting_from += 1
        fate = c.fates[request]
        host = fate.host
        if s.write_through != 0:
            # The host tier pins nothing for long: where it has no room the request passes it by.
            if not start(h, request):
                h.fates[request].status = REJECTED
            host = max(0, h.fates[request].hit - fate.hit)
            fate.host = host
        c.flows[r.flow].context = before
        set_context(p, c, r.flow, r.prompt + r.output)
        if s.service == FIXED:
            seconds = r.service
            if np.isnan(seconds):
                seconds = r.output / s.decode
            fate.first_token = now
            push(p, now + seconds, FINISHED, request)
            continue
        prefilled = now + (r.prompt - fate.hit - host) / s.prefill + host / s.restore
        fate.first_token = prefilled
        if s.service == QUEUED:
            s.prefilling = 1
            push(p, prefilled, PREFILLED, request)
        else:
            push(p, prefilled + r.output / s.decode, FINISHED, request)


@core
def end_session(p: Loop, index: int, now: float) -> None:
    s = p.state[0]
    at = 0
    while p.active[at] != index:
        at += 1
    for k in range(at + 1, s.active):
        p.active[k - 1] = p.active[k]
    s.active -= 1
    p.free_since[s.clients - s.active - 1] = now


@core
def on_finished(p: Loop, c: Cache, h: Cache, request: int) -> None:
    """An answer is complete: go on with its flow, start and join subagents, end the session."""
    r = c.requests[request]
    f = c.flows[r.flow]
    now = c.clock[0].now
    session = p.sessions[f.session]
    last = r.next == NONE
    if last:
        set_state(c, r.flow, ENDED)
    finish(c, request)
    if p.state[0].write_through != 0:
        if last:
            set_state(h, r.flow, ENDED)
        finish(h, request)
    for flow in range(session.first_flow + 1, session.first_flow + session.flows):
        if c.flows[flow].spawn == request:
            push(p, now + think(p, c, c.flows[flow].first), READY, c.flows[flow].first)
    if not last:
        push(p, now + think(p, c, r.next), READY, r.next)
        return
    set_context(p, c, r.flow, 0)
    session.live -= 1
    if f.join != NONE:
        p.joins[f.join] -= 1
        main = c.flows[session.first_flow]
        if p.joins[f.join] == 0 and main.held == f.join:
            main.held = NONE
            push(p, now, READY, f.join)
    if session.live == 0:
        end_session(p, f.session, now)


@jit
def run(p: Loop, c: Cache, h: Cache, limit: int) -> bool:
    """Handle up to ``limit`` events; true when there are none left."""
    s = p.state[0]
    for _ in range(limit):
        if s.events == 0:
            return True
        time, kind, request = pop(p)
        # The end of a run, when clients find no session left, says nothing of the load before.
        if s.next_session < len(p.order) or len(p.order) <= s.clients:
            s.area += s.context * (time - s.now)
            s.busy += time - s.now
        s.now = time
        c.clock[0].now = time
        h.clock[0].now = time
        if kind == READY:
            on_ready(p, c, h, request)
        elif kind == PREFILLED:
            s.prefilling = 0
            push(p, time + c.requests[request].output / s.decode, FINISHED, request)
        else:
            on_finished(p, c, h, request)
            unpark(p, c, h)
            admit(p, c)
        dispatch(p, c, h)
    return bool(s.events == 0)
