"""Time: closed-loop sessions with think times, a service model, admission. One event queue.

Each of N clients plays one session after the other. A turn is ready when its predecessor's answer is there and the
think time has passed, a main turn that joins subagents not before they ended. Requests start in order of arrival;
one that finds no memory holds up those behind it, as in a server's queue.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from radix_cache.simulator.jit import core, jit
from radix_cache.simulator.layout import NONE, REJECTED, SESSION, fate_at, flow_at, request_at
from radix_cache.simulator.memory import INDEX, NUMBER, call_int, record_at
from radix_cache.simulator.queue import pop, push
from radix_cache.simulator.serve import arrive, finish, set_state, start

READY, PREFILLED, FINISHED = 0, 1, 2
FIXED, PARALLEL, QUEUED = 0, 1, 2
LIVE, PARKED, ENDED = 0, 1, 2

LOOP = np.dtype(
    [
        ("clients", "i8"),
        ("service", "i8"),
        ("write_through", "i8"),
        ("think_cap", "f8"),  # seconds
        ("prefill", "f8"),  # tokens per second
        ("decode", "f8"),  # tokens per second and request
        ("restore", "f8"),  # tokens per second from the host tier
        # Addresses of arrays.
        ("events", "i8"),  # EVENT, a binary heap
        ("waiting", "i8"),  # int32: requests in arrival order, those that wait are waiting[from:to]
        ("active", "i8"),  # int32: sessions by seniority
        ("order", "i8"),  # int32: sessions in order of arrival
        ("free_since", "i8"),  # float64: for the clients without a session, oldest first
        ("sessions", "i8"),  # SESSION
        ("joins", "i8"),  # int32, by request: flows that must still end
        # Addresses of C functions, called only where admission may say no.
        ("admit", "i8"),
        ("go_on", "i8"),
        ("admits_all", "i8"),
        ("session_count", "i8"),
        ("event_count", "i8"),
        ("numbered", "i8"),
        ("waiting_from", "i8"),
        ("waiting_to", "i8"),
        ("prefilling", "i8"),  # 1 while the one prefill of the queued model runs
        ("active_count", "i8"),
        ("parked", "i8"),  # sessions
        ("next_session", "i8"),
        ("context", "i8"),  # tokens of all live flows
        ("area", "f8"),  # integral of it over the time that all clients were busy
        ("busy", "f8"),  # that time, in seconds
        ("now", "f8"),
        ("parkings", "i8"),
    ],
    align=True,
)


@core
def session_at(p: Any, index: int) -> Any:
    return record_at(p.sessions, index, SESSION)


@core
def index_at(address: int, index: int) -> Any:
    return record_at(address, index, INDEX)


@core
def number_at(address: int, index: int) -> Any:
    return record_at(address, index, NUMBER)


@core
def think(p: Any, c: Any, request: int) -> float:
    return float(min(request_at(c, request).think, p.think_cap))


@core
def set_context(p: Any, c: Any, flow: int, tokens: int) -> None:
    f = flow_at(c, flow)
    change = tokens - f.context
    f.context = tokens
    session_at(p, f.session).context += change
    p.context += change


@core
def set_states(p: Any, c: Any, h: Any, session: int, state: int) -> None:
    """Park a session's live flows, or let them go on."""
    first = session_at(p, session).first_flow
    for flow in range(first, first + session_at(p, session).flows):
        if flow_at(c, flow).state != ENDED:
            set_state(c, flow, state)
            if p.write_through != 0:
                set_state(h, flow, state)


@core
def may_go_on(p: Any, c: Any, session: int) -> bool:
    """Ask the admission policy whether a started session may send its next request."""
    if p.admits_all != 0:
        return True
    older = 0
    for k in range(p.active_count):
        if index_at(p.active, k).value == session:
            if k == 0:
                return True
            break
        older += session_at(p, index_at(p.active, k).value).context
    own = session_at(p, session).context
    return bool(call_int(p.go_on, (float(older), float(own), float(c.capacity * c.page))) != 0)


@core
def enqueue(p: Any, c: Any, h: Any, request: int) -> None:
    index_at(p.waiting, p.waiting_to).value = request
    p.waiting_to += 1


@core
def on_ready(p: Any, c: Any, h: Any, request: int) -> None:
    """A request may be sent: learn its gap, then queue it unless its session is to be parked."""
    r = request_at(c, request)
    f = flow_at(c, r.flow)
    if index_at(p.joins, request).value > 0:
        f.held = request
        return
    now = c.now
    c.stamp += 1
    fate_at(c, request).ready = now
    fate_at(c, request).ready_stamp = c.stamp
    if request != f.first:
        arrive(c, request, request - 1)
        if p.write_through != 0:
            h.stamp += 1
            fate_at(h, request).ready_stamp = h.stamp
            arrive(h, request, request - 1)
    session = session_at(p, f.session)
    if session.parked != 0 or not may_go_on(p, c, f.session):
        f.held = request
        if session.parked == 0:
            session.parked = 1
            p.parkings += 1
            p.parked += 1
            set_states(p, c, h, f.session, PARKED)
        return
    enqueue(p, c, h, request)


@core
def unpark(p: Any, c: Any, h: Any) -> None:
    """Let parked sessions go on, the oldest first."""
    if p.parked == 0:
        return
    for k in range(p.active_count):
        index = index_at(p.active, k).value
        session = session_at(p, index)
        if session.parked == 0 or not may_go_on(p, c, index):
            continue
        session.parked = 0
        p.parked -= 1
        set_states(p, c, h, index, LIVE)
        for flow in range(session.first_flow, session.first_flow + session.flows):
            held = flow_at(c, flow).held
            if held != NONE and index_at(p.joins, held).value == 0:
                flow_at(c, flow).held = NONE
                enqueue(p, c, h, held)


@jit
def admit(p: Any, c: Any) -> None:
    """Start sessions on free clients as long as the admission policy lets them."""
    now = c.now
    while p.active_count < p.clients and p.next_session < p.session_count:
        index = index_at(p.order, p.next_session).value
        session = session_at(p, index)
        first = flow_at(c, session.first_flow).first
        own = request_at(c, first).prompt
        capacity = float(c.capacity * c.page)
        if (
            p.admits_all == 0
            and p.active_count > 0
            and call_int(p.admit, (float(p.context), float(own), capacity)) == 0
        ):
            return
        free = p.clients - p.active_count
        session.wanted = number_at(p.free_since, 0).value
        for k in range(1, free):
            number_at(p.free_since, k - 1).value = number_at(p.free_since, k).value
        session.started = now
        session.live = session.flows
        index_at(p.active, p.active_count).value = index
        p.active_count += 1
        p.next_session += 1
        set_context(p, c, session.first_flow, own)
        for flow in range(session.first_flow, session.first_flow + session.flows):
            if flow == session.first_flow or flow_at(c, flow).spawn == NONE:
                begin = flow_at(c, flow).first
                push(p, now + think(p, c, begin), READY, begin)


@core
def dispatch(p: Any, c: Any, h: Any) -> None:
    """Start waiting requests, first come first served."""
    now = c.now
    while p.waiting_from < p.waiting_to and not (p.service == QUEUED and p.prefilling != 0):
        request = index_at(p.waiting, p.waiting_from).value
        r = request_at(c, request)
        before = flow_at(c, r.flow).context
        if not start(c, request):
            return
        p.waiting_from += 1
        fate = fate_at(c, request)
        host = fate.host
        if p.write_through != 0:
            # The host tier pins nothing for long: where it has no room the request passes it by.
            if not start(h, request):
                fate_at(h, request).status = REJECTED
            host = max(0, fate_at(h, request).hit - fate.hit)
            fate.host = host
        flow_at(c, r.flow).context = before
        set_context(p, c, r.flow, r.prompt + r.output)
        if p.service == FIXED:
            seconds = r.service
            if np.isnan(seconds):
                seconds = r.output / p.decode
            fate.first_token = now
            push(p, now + seconds, FINISHED, request)
            continue
        prefilled = now + (r.prompt - fate.hit - host) / p.prefill + host / p.restore
        fate.first_token = prefilled
        if p.service == QUEUED:
            p.prefilling = 1
            push(p, prefilled, PREFILLED, request)
        else:
            push(p, prefilled + r.output / p.decode, FINISHED, request)


@core
def end_session(p: Any, index: int, now: float) -> None:
    at = 0
    while index_at(p.active, at).value != index:
        at += 1
    for k in range(at + 1, p.active_count):
        index_at(p.active, k - 1).value = index_at(p.active, k).value
    p.active_count -= 1
    number_at(p.free_since, p.clients - p.active_count - 1).value = now


@core
def on_finished(p: Any, c: Any, h: Any, request: int) -> None:
    """An answer is complete: go on with its flow, start and join subagents, end the session."""
    r = request_at(c, request)
    f = flow_at(c, r.flow)
    now = c.now
    session = session_at(p, f.session)
    last = r.next == NONE
    if last:
        set_state(c, r.flow, ENDED)
    finish(c, request)
    if p.write_through != 0:
        if last:
            set_state(h, r.flow, ENDED)
        finish(h, request)
    for flow in range(session.first_flow + 1, session.first_flow + session.flows):
        if flow_at(c, flow).spawn == request:
            push(p, now + think(p, c, flow_at(c, flow).first), READY, flow_at(c, flow).first)
    if not last:
        push(p, now + think(p, c, r.next), READY, r.next)
        return
    set_context(p, c, r.flow, 0)
    session.live -= 1
    if f.join != NONE:
        index_at(p.joins, f.join).value -= 1
        main = flow_at(c, session.first_flow)
        if index_at(p.joins, f.join).value == 0 and main.held == f.join:
            main.held = NONE
            push(p, now, READY, f.join)
    if session.live == 0:
        end_session(p, f.session, now)


@jit
def run(p: Any, c: Any, h: Any, limit: int) -> bool:
    """Handle up to ``limit`` events; true when there are none left."""
    for _ in range(limit):
        if p.event_count == 0:
            return True
        time, kind, request = pop(p)
        # The end of a run, when clients find no session left, says nothing of the load before.
        if p.next_session < p.session_count or p.session_count <= p.clients:
            p.area += p.context * (time - p.now)
            p.busy += time - p.now
        p.now = time
        c.now = time
        h.now = time
        if kind == READY:
            on_ready(p, c, h, request)
        elif kind == PREFILLED:
            p.prefilling = 0
            push(p, time + request_at(c, request).output / p.decode, FINISHED, request)
        else:
            on_finished(p, c, h, request)
            unpark(p, c, h)
            admit(p, c)
        dispatch(p, c, h)
    return bool(p.event_count == 0)
