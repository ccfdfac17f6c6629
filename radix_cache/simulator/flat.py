"""A workload of flat prompts: one request a session, from arrays, in one compiled pass.

Record by record what ``WorkloadBuilder`` makes of the same requests, added one by one with global ids
(``tests/test_simulator_flat.py``), without its time in Python for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from radix_cache.simulator.jit import inlined, jit
from radix_cache.simulator.layout import NONE, REQUEST, ROOT, TRIE
from radix_cache.simulator.workload import Workload, finished

Ints = npt.NDArray[np.int64]


def flat_workload(
    page_size: int, prompt_tokens: Ints, output_tokens: Ints, ids: Ints, service_s: npt.NDArray[np.float64]
) -> Workload:
    """Sessions of one request each, named by their position, in order of arrival.

    Args:
        page_size: tokens per page.
        prompt_tokens: by request, at least 1.
        output_tokens: by request.
        ids: chained ids of the full pages of all prompts, one prompt after the other; they mean the same in all.
        service_s: recorded seconds by request, NaN where unknown.

    Raises:
        ValueError: no request, a length that cannot be, or ids that are not those of the full pages.
    """
    count = len(prompt_tokens)
    pages = prompt_tokens // page_size
    if page_size < 1 or not count or (prompt_tokens < 1).any() or (output_tokens < 0).any():
        raise ValueError(
            "a workload needs pages of 1 token or more and prompts of 1 token or more, answers of 0 or more"
        )
    if len(output_tokens) != count or len(service_s) != count or len(ids) != int(pages.sum()):
        raise ValueError(
            f"{count} prompts have {int(pages.sum())} full pages of {page_size}; got {len(ids)} ids, "
            f"{len(output_tokens)} answers and {len(service_s)} durations"
        )
    answers = (prompt_tokens + np.maximum(output_tokens - 1, 0)) // page_size - pages
    room = int(len(ids) + answers.sum())
    slots = 1 << max(4, int(2 * len(ids)).bit_length())
    trie = np.zeros(1 + 4 * count, dtype=TRIE)  # a request adds a run and cuts at most three
    trie[ROOT] = (ROOT, -1, 1, 0)
    requests = np.zeros(count, dtype=REQUEST)
    requests["flow"] = np.arange(count)
    requests["next"] = NONE
    requests["prompt"], requests["output"], requests["service"] = prompt_tokens, output_tokens, service_s
    used = _add_all(
        ids,
        answers,
        page_size,
        requests,
        trie,
        np.empty(slots, dtype=np.int64),
        np.full(slots, NONE, dtype=np.int32),
        np.full(room, NONE, dtype=np.int32),
        np.empty(int((pages + answers).max()), dtype=np.int64),
    )
    single = np.arange(count)
    return finished(
        page_size,
        trie[:used].copy(),
        requests,
        flows={"session": single, "first": single, "spawn": NONE, "join": NONE},
        sessions={"first_flow": single, "flows": 1},
        session_ids=tuple(map(str, range(count))),
        accesses=len(ids),
    )


@inlined
def _slot(keys: Any, numbers: Any, page: int) -> int:
    """Where a page id is in the table, or may be put."""
    mask = len(keys) - 1
    at = (page ^ page >> 20) & mask  # ids that count up lie side by side, hashes spread by themselves
    while numbers[at] != NONE and keys[at] != page:
        at = (at + 1) & mask
    return int(at)


@inlined
def _cut(trie: Any, used: int, of_page: Any, path: Any, at: int) -> int:
    """As ``workload._Trie``: the node that ends ``at`` pages from the root; ``used`` when it had to be made."""
    node = of_page[path[at - 1]]
    n = trie[node]
    if n.start + n.length == at:
        return int(node)
    new = trie[used]
    new.parent, new.start, new.length = n.parent, n.start, at - n.start
    n.parent = used
    n.length -= new.length
    n.start = at
    for k in range(new.start, at):
        of_page[path[k]] = used
    return used


@jit
def _add_all(
    ids: Any,
    answers: Any,
    page: int,
    requests: Any,
    trie: Any,
    keys: Any,
    numbers: Any,
    of_page: Any,
    path: Any,
) -> int:
    """Number the pages, insert all prompts and answers into the trie; the number of nodes in use."""
    used, fresh, first = 1, 0, 0
    for i in range(len(requests)):
        r = requests[i]
        pages = r.prompt // page
        whole = pages + answers[i]
        known = 0
        while known < pages:
            at = _slot(keys, numbers, ids[first + known])
            if numbers[at] == NONE:
                break
            path[known] = numbers[at]
            known += 1
        for k in range(known, whole):
            path[k] = fresh
            if k < pages:
                at = _slot(keys, numbers, ids[first + k])
                keys[at] = ids[first + k]
                numbers[at] = fresh
            fresh += 1
        first += pages
        if known < whole:
            parent = ROOT
            if known > 0:
                parent = _cut(trie, used, of_page, path, known)
                used += parent == used
            n = trie[used]
            n.parent, n.start, n.length = parent, known, whole - known
            for k in range(known, whole):
                of_page[path[k]] = used
            used += 1
        if pages > 0:
            r.end = _cut(trie, used, of_page, path, pages)
            used += r.end == used
        cap = (r.prompt - 1) // page
        if cap > 0:
            r.cap = _cut(trie, used, of_page, path, cap)
            used += r.cap == used
        if whole > 0:
            r.kv = _cut(trie, used, of_page, path, whole)
            used += r.kv == used
    return used
