"""Gittins index of a waiting conversation, by stop reason and age, learned online.

Keeping a conversation's prefix costs memory for as long as it waits and pays when its next turn comes. With T the
gap between an answer and the next turn, the best ratio that can still be had at age a is

    G(a) = max over tau of  P(T <= a + tau | T > a) / E[min(T - a, tau) | T > a]

and 1/G is the waiting time that one hit costs. A miss costs memory too: for ``context / prefill`` seconds the whole
context is held while its missing part is computed. So the greatest ``1/G - context / prefill`` goes first. G is
learned for each stop reason, and for quick and slow conversations, from the gaps seen (``radix_cache.gaps``).

Ended conversations and abandoned branches go before all, then parked ones. A node that several flows used is kept or
given up by the gaps between *its* uses, whoever makes them. Use it wherever memory is short; it needs a stop
reason and the knowledge which request continues which.
Source: Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41(2), 1979.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import FlowState, NodeFeatures
from radix_cache.gaps import RANK_ROWS, SHARED_GAPS, gap_row, rank_row

_ENDED = int(FlowState.ENDED)
_PARKED = int(FlowState.PARKED)

DEAD, PARKED, FIRST_LEARNED = 0, 1, 2


def key(f: NodeFeatures) -> float:
    return f.last_access


@register("gittins")
def gittins(prefill: float = 10_000) -> EvictionPolicy:
    """``prefill``: tokens per second that one request is computed with; ``inf`` where a miss takes no time."""
    if not prefill > 0:
        raise ValueError(f"eviction policy gittins: the prefill speed must be above 0 tokens per second, got {prefill}")

    def group(f: NodeFeatures) -> int:
        if f.superseded > 0:
            return DEAD
        if f.sharers >= 2:
            return FIRST_LEARNED + rank_row(SHARED_GAPS, f.context / prefill)
        if f.state == _ENDED:
            return DEAD
        if f.state == _PARKED:
            return PARKED
        return FIRST_LEARNED + rank_row(gap_row(f.stop, f.pace), f.context / prefill)

    learned = tuple(range(FIRST_LEARNED, FIRST_LEARNED + RANK_ROWS))
    return EvictionPolicy("gittins", key, group, groups=learned[-1] + 1, learned_groups=learned)
