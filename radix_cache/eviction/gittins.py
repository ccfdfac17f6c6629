"""Gittins index of a waiting conversation, by stop reason and age, learned online.

Keeping a conversation's prefix costs memory for as long as it waits and pays when its next turn comes. With T the
gap between an answer and the next turn, the best ratio that can still be had at age a is

    G(a) = max over tau of  P(T <= a + tau | T > a) / E[min(T - a, tau) | T > a]

and the least G goes first. G is learned for each stop reason from the gaps seen (``radix_cache.gaps``). Ended
conversations and abandoned branches go before all, then parked ones. A node that several flows used is kept or
given up by the gaps between *its* uses, whoever makes them. Use it wherever memory is short; it needs a stop
reason and the knowledge which request continues which.
Source: Gittins, "Bandit processes and dynamic allocation indices", J. R. Stat. Soc. B 41(2), 1979.
"""

from __future__ import annotations

from radix_cache.eviction.base import EvictionPolicy, register
from radix_cache.features import FlowState, NodeFeatures
from radix_cache.gaps import GAP_ROWS, SHARED_GAPS, gap_row

_ENDED = int(FlowState.ENDED)
_PARKED = int(FlowState.PARKED)

DEAD, PARKED, FIRST_LEARNED = 0, 1, 2


def key(f: NodeFeatures) -> float:
    return f.last_access


def group(f: NodeFeatures) -> int:
    if f.superseded > 0:
        return DEAD
    if f.sharers >= 2:
        return FIRST_LEARNED + SHARED_GAPS
    if f.state == _ENDED:
        return DEAD
    if f.state == _PARKED:
        return PARKED
    return FIRST_LEARNED + gap_row(f.stop, f.pace)


@register("gittins")
def gittins() -> EvictionPolicy:
    learned = tuple(range(FIRST_LEARNED, FIRST_LEARNED + GAP_ROWS))
    return EvictionPolicy("gittins", key, group, groups=learned[-1] + 1, learned_groups=learned)
