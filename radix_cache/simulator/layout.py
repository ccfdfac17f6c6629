"""The records that the simulator's compiled core works on. One record a thing, one cache line or two a record."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Records = Any  # structured arrays: fields of a record are attributes in compiled code, which numpy's types lack
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]

NONE = -1
ROOT = 0  # node 0: resident, unevictable, of no length

# A run of pages between two points where any request of the workload branches or ends.
NODE = np.dtype(
    [
        ("parent", "i4"),
        ("start", "i4"),  # pages from the root to its first page
        ("length", "i4"),  # pages
        ("level", "i4"),  # nodes above it when the workload was built
        ("resident", "i4"),  # leading pages in the device cache
        ("kids", "i4"),  # children with device pages
        ("pins", "i4"),  # running requests whose prompt ends here; those above need no pin, they have kids
        ("joined", "i4"),  # child that is one radix node with this one, as a server would have stored it
        ("owner", "i4"),  # flow of the last use
        ("first", "i4"),  # flow of the first use since insertion
        ("used_by", "i4"),  # request of the last use
        ("host", "i4"),  # pages in the host tier, following the resident ones
        ("host_kids", "i4"),  # children with host pages
        ("mark", "i4"),
        ("shared", "u1"),
        ("superseded", "u1"),
        ("hits", "f8"),
        ("inserted", "f8"),
        ("time", "f8"),  # last use at or below, as far as the nodes below are gone: exact for a leaf
        ("stamp", "i8"),  # order of last uses, unique per event
        ("seen", "f8"),  # last use by any flow, kept for the heads that flows share
        ("context", "i4"),  # of the last user at that use: tokens of prompt and answer
        ("stop", "i4"),  # of the last user at that use
        ("pace", "f8"),
    ],
    align=True,
)

# A node's place in the pairing heap of its bucket.
PLACE = np.dtype(
    [
        ("key", "f8"),
        ("stamp", "i8"),
        ("child", "i4"),
        ("sibling", "i4"),
        ("previous", "i4"),  # left sibling, or parent of the first child
        ("bucket", "i4"),
    ],
    align=True,
)

REQUEST = np.dtype(
    [
        ("flow", "i4"),
        ("next", "i4"),  # next request of the flow
        ("prompt", "i4"),  # tokens
        ("output", "i4"),  # tokens
        ("end", "i4"),  # node where the prompt's full pages end
        ("cap", "i4"),  # node where the pages that may hit end: the last token is always computed
        ("kv", "i4"),  # node where the pages with known KV end after the answer
        ("head", "i4"),  # deepest node of the prompt that another flow uses as well
        ("joins", "i4"),  # flows that must end before this request
        ("stop", "i4"),
        ("think", "f8"),  # seconds since the previous answer
        ("service", "f8"),  # recorded seconds; NaN where unknown
    ],
    align=True,
)

FLOW = np.dtype(
    [
        ("session", "i4"),
        ("first", "i4"),  # first request
        ("spawn", "i4"),  # request whose end starts it; NONE: starts with the session
        ("join", "i4"),  # request that waits for its end
        ("state", "i4"),
        ("stop", "i4"),  # of its last finished request
        ("context", "i4"),  # tokens of its newest request, prompt and answer
        ("newest", "i4"),  # its newest request that has started
        ("last_end", "i4"),  # node where its newest sequence ends
        ("held", "i4"),  # request that waits for a join or for the end of parking
        ("last_done", "f8"),
        ("pace", "f8"),  # see radix_cache.gaps
    ],
    align=True,
)

SESSION = np.dtype(
    [
        ("first_flow", "i4"),
        ("flows", "i4"),
        ("live", "i4"),
        ("parked", "i4"),
        ("context", "i8"),  # tokens of its live flows
        ("wanted", "f8"),  # when a client was free for it
        ("started", "f8"),
    ],
    align=True,
)

# What happened to a request.
FATE = np.dtype(
    [
        ("hit", "i4"),  # prompt tokens served by the device cache
        ("host", "i4"),  # further prompt tokens served by the host tier
        ("reserve", "i4"),  # pages held beside the tree while it runs
        ("total", "i4"),  # pages in the tree and beside it that it needs
        ("status", "i4"),
        ("place", "i4"),  # index among the running ones
        ("ready", "f8"),
        ("start", "f8"),
        ("first_token", "f8"),
        ("done", "f8"),
        ("ready_stamp", "i8"),
        ("start_stamp", "i8"),
        ("done_stamp", "i8"),
    ],
    align=True,
)
PENDING, RUNNING, DONE, REJECTED = 0, 1, 2, 3

CACHE_STATE = np.dtype(
    [
        ("capacity", "i8"),  # pages
        ("used", "i8"),  # pages in the tree
        ("reserved", "i8"),  # pages of running requests outside the tree
        ("promised", "i8"),  # pages of all running requests, shared ones counted each time
        ("page", "i8"),  # tokens per page
        ("nodes", "i8"),
        ("running", "i8"),
        ("mark", "i8"),
        ("truncate", "i8"),
        ("insert_output", "i8"),
        ("uses_depth", "i8"),
        ("host_capacity", "i8"),
        ("host_used", "i8"),
        ("host_uses_depth", "i8"),
        ("learned", "i8"),  # first learned row of the device ranks; NONE: nothing is learned
        ("host_learned", "i8"),
        ("evicted_live", "i8"),  # pages, by the state of their last user
        ("evicted_parked", "i8"),
        ("evicted_ended", "i8"),
        ("evicted_superseded", "i8"),
        ("evictions", "i8"),  # victims
        ("host_dropped", "i8"),
        ("inserted", "i8"),
        ("rebuilds", "i8"),  # rows of ranks computed anew
        ("cause", "i8"),  # request that makes room
        ("logged", "i8"),  # entries that the log has or lacked room for
        ("broken", "i8"),  # an invariant failed: the run is void
    ],
    align=True,
)

CLOCK = np.dtype([("stamp", "i8"), ("now", "f8")], align=True)


class Order(NamedTuple):
    """Victim order of one tier: a pairing heap for each bucket, a bucket for each (group, age bin)."""

    places: Records  # PLACE, one a node
    roots: Ints  # by bucket
    alive: Ints  # how many buckets follow, then those that may hold something
    listed: Ints  # bucket -> NONE when it is not among these
    ranks: Floats  # shape (groups, bins)
    edges: Floats  # seconds, shape (bins + 1,)
    group: Any
    key: Any


class Cache(NamedTuple):
    """One cache with the workload that runs on it."""

    state: Records  # CACHE_STATE, one record
    clock: Records  # CLOCK, one record
    nodes: Records
    order: Order
    host: Order
    requests: Records
    flows: Records
    fates: Records
    running: Ints
    counts: Floats  # learned gaps
    fresh: Ints  # gaps since a row's ranks were computed
    next_use: Ints  # request that uses a path node next, flat by (request, level)
    next_offset: npt.NDArray[np.int64]
    elapsed: Floats  # request -> seconds from its flow's first start to its own, when nothing waits
    expected: Floats  # request -> start in the known order, seconds
    log: Records  # of evictions (``radix_cache.simulator.evictions``); without room: off
