"""The records that the simulator's compiled core works on. One record a thing, one cache line or two a record."""

from __future__ import annotations

from typing import Any

import numpy as np

from radix_cache.simulator.jit import core
from radix_cache.simulator.memory import record_at

Records = Any  # structured arrays: fields of a record are attributes in compiled code, which numpy's types lack

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

# Of a node what never changes.
TRIE = np.dtype([("parent", "i4"), ("start", "i4"), ("length", "i4"), ("level", "i4")])

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
        ("last_pages", "i4"),  # its pages that the tree was given, where a server's steps are played
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

# Victim order of one tier: a pairing heap for each bucket, a bucket for each (group, age bin).
ORDER = np.dtype(
    [
        ("places", "i8"),  # address of PLACE records, one a node
        ("roots", "i8"),  # address of int32, by bucket: group * bins + bin
        ("alive", "i8"),  # address of int32: how many buckets follow, then those that may hold something
        ("listed", "i8"),  # address of int32, by bucket: NONE when it is not among these
        ("ranks", "i8"),  # address of float64, by bucket
        ("edges", "i8"),  # address of float64: seconds, one more than bins where ranks are learned
        ("group", "i8"),  # address of a C function
        ("key", "i8"),  # address of a C function
        ("groups", "i8"),
        ("bins", "i8"),
        ("uses_depth", "i8"),
        ("learned", "i8"),  # first learned group; NONE: nothing is learned
    ],
    align=True,
)

# One cache with the workload that runs on it.
CACHE = np.dtype(
    [
        ("now", "f8"),
        ("stamp", "i8"),
        ("capacity", "i8"),  # pages
        ("used", "i8"),  # pages in the tree
        ("reserved", "i8"),  # pages of running requests outside the tree
        ("promised", "i8"),  # pages of all running requests, shared ones counted each time
        ("spare", "i8"),  # pages that a running request takes beside its own, where there is room
        ("page", "i8"),  # tokens per page
        ("truncate", "i8"),
        ("insert_output", "i8"),
        ("host_capacity", "i8"),
        ("host_used", "i8"),
        ("host_takes_all", "i8"),  # 0: only what may be asked for again (``radix_cache.admission.host``)
        ("known", "i8"),  # 1: the future is known
        # Addresses of arrays.
        ("nodes", "i8"),  # NODE
        ("order", "i8"),  # ORDER, the device's and the host tier's
        ("requests", "i8"),  # REQUEST
        ("flows", "i8"),  # FLOW
        ("fates", "i8"),  # FATE
        ("running", "i8"),  # int32
        ("counts", "i8"),  # float64: learned gaps, a row of AGE_BINS for each kind
        ("fresh", "i8"),  # int32: gaps since a row's ranks were computed
        ("next_use", "i8"),  # int32: request that uses a path node next, flat by (request, level)
        ("plans", "i8"),  # PLAN, by request
        ("log", "i8"),  # of evictions (``radix_cache.simulator.evictions``)
        ("log_room", "i8"),  # entries; 0: off
        ("node_count", "i8"),
        ("running_count", "i8"),
        ("mark", "i8"),
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

# What is known of a request before it comes.
PLAN = np.dtype(
    [
        ("next_use", "i8"),  # where its path begins in CACHE.next_use
        ("elapsed", "f8"),  # seconds from its flow's first start to its own, when nothing waits
        ("expected", "f8"),  # start in the known order, seconds
    ],
    align=True,
)


@core
def node_at(c: Any, index: int) -> Any:
    return record_at(c.nodes, index, NODE)


@core
def request_at(c: Any, index: int) -> Any:
    return record_at(c.requests, index, REQUEST)


@core
def flow_at(c: Any, index: int) -> Any:
    return record_at(c.flows, index, FLOW)


@core
def fate_at(c: Any, index: int) -> Any:
    return record_at(c.fates, index, FATE)


@core
def plan_at(c: Any, index: int) -> Any:
    return record_at(c.plans, index, PLAN)


@core
def device(c: Any) -> Any:
    """The victim order of the device."""
    return record_at(c.order, 0, ORDER)


@core
def host(c: Any) -> Any:
    """The victim order of the host tier."""
    return record_at(c.order, 1, ORDER)


@core
def place_at(o: Any, index: int) -> Any:
    return record_at(o.places, index, PLACE)
