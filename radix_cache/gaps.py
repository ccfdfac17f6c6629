"""How long conversations wait, learned online, and what their wait is worth: the state behind ``gittins``.

Gaps are counted in quarter-octave bins for each reason to wait. Memory is fixed: one small array, whatever the
number of sessions. The functions below are plain loops over arrays, so that the simulator compiles the very same
code.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from radix_cache.features import Stop

Floats = npt.NDArray[np.float64]

AGE_BINS = 64

# A flow that was quick will be quick again: rows are split by its pace, the mean bin of its gaps so far. The
# limit is near the median of real tool calls, 8 s. More levels learn more slowly and gained nothing.
PACE_LIMITS = (21.0,)
PACE_LEVELS = len(PACE_LIMITS) + 2  # and one for flows without a gap yet
PACE_WEIGHT = 0.1  # of the newest gap

# To miss a token of a long conversation costs more than of a short one: while it is computed again, the whole
# context is held in memory. At WORTH_DOUBLE tokens of context that costs as much as the computation itself: about
# the prefill speed (tokens/s) times the seconds for which memory is worth holding. Ranks are kept for classes of
# context length, each with the worth of its geometric mean.
CONTEXT_LIMITS = (25_000.0, 50_000.0, 100_000.0, 200_000.0, 400_000.0)
CONTEXT_CLASSES = len(CONTEXT_LIMITS) + 1
WORTH_DOUBLE = 400_000.0
WORTH: Floats = 1 + np.array([0.0, *(limit * 2**0.5 for limit in CONTEXT_LIMITS)]) / WORTH_DOUBLE

# A row of ranks is a kind of gap and a class of context; the rows of one kind follow each other.
KINDS = len(Stop) * PACE_LEVELS + 1
SHARED_GAPS = (KINDS - 1) * CONTEXT_CLASSES  # first row of the gaps between uses of nodes that several flows use
GAP_ROWS = KINDS * CONTEXT_CLASSES

# Lower edges in seconds: everything under 0.25 s is one bin, the last one is open (from 3.2 h).
AGE_EDGES: Floats = np.concatenate(([0.0], 0.25 * 2.0 ** (np.arange(AGE_BINS) / 4)))

# Before anything was seen all bins are equally likely, which is a falling hazard: the order of LRU.
PRIOR = 1.0 / AGE_BINS
# Above this the counts of a kind are halved: old traffic fades, and sums stay exact.
MAX_OBSERVED = 8192.0
# A kind's ranks are computed anew after this many gaps.
REFRESH = 16


def new_counts() -> Floats:
    """Counts before the first observation, float64, shape ``(KINDS, AGE_BINS)``."""
    return np.full((KINDS, AGE_BINS), PRIOR)


def age_bin(age: float, edges: Floats) -> int:
    """Bin of an age in seconds; negative ages (clocks differ) count as 0."""
    low, high = 0, len(edges) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if edges[middle] <= age:
            low = middle
        else:
            high = middle
    return low


def gap_row(stop: float, pace: float) -> int:
    """First row of the gaps that follow an answer which ended with ``stop`` in a flow of that pace."""
    level = 0
    if pace >= 0:
        level = 1
        for limit in PACE_LIMITS:
            if pace >= limit:
                level += 1
    return (int(stop) * PACE_LEVELS + level) * CONTEXT_CLASSES


def context_class(context: float) -> int:
    """Class of a context of that many tokens: what to add to a row."""
    level = 0
    for limit in CONTEXT_LIMITS:
        if context >= limit:
            level += 1
    return level


def new_pace(pace: float, bin_index: int) -> float:
    """A flow's pace after one more gap."""
    return float(bin_index) if pace < 0 else pace + PACE_WEIGHT * (bin_index - pace)


def count_gap(counts: Floats, kind: int, bin_index: int) -> None:
    """Add one observed gap to a kind of gap; halve its counts when there are many."""
    counts[kind, bin_index] += 1.0
    if counts[kind].sum() > MAX_OBSERVED:
        for j in range(counts.shape[1]):
            counts[kind, j] *= 0.5


def rank_kind(counts: Floats, edges: Floats, worth: Floats, ranks: Floats) -> None:
    """Gittins index per second for each age bin, times the worth of each class of context.

    Args:
        counts: gaps seen per bin, shape ``(bins,)``.
        edges: bin edges in seconds, shape ``(bins + 1,)``.
        worth: shape ``(classes,)``.
        ranks: output, shape ``(classes, bins)``; never negative.
    """
    bins = len(counts)
    left = 0.0  # gaps not over yet at the age of bin b
    for b in range(bins - 1, -1, -1):
        left += counts[b]
        came = 0.0
        waited = 0.0
        best = 0.0
        for k in range(b, bins):
            came += counts[k]
            waited += counts[k] * (0.5 * (edges[k] + edges[k + 1]) - edges[b])
            spent = waited + (left - came) * (edges[k + 1] - edges[b])
            if came > best * spent:
                best = came / spent
        for j in range(len(worth)):
            ranks[j, b] = best * worth[j]


class GapTable:
    """Learned ranks for one cache.

    ``ranks[row, bin]`` is the index (1/s) of a wait of that age; rows are those of ``gap_row`` or ``SHARED_GAPS``
    plus ``context_class``.
    """

    def __init__(self) -> None:
        self.counts = new_counts()
        self.ranks = np.zeros((GAP_ROWS, AGE_BINS))
        self._fresh = np.zeros(KINDS, dtype=np.int64)
        for kind in range(KINDS):
            self._rank(kind)

    def observe(self, row: int, gap_s: float) -> bool:
        """Count one gap, in seconds, between a use and the next; true when ranks changed.

        ``row`` is that of ``gap_row`` or ``SHARED_GAPS``; the gap counts for all classes of context.
        """
        kind = row // CONTEXT_CLASSES
        count_gap(self.counts, kind, age_bin(gap_s, AGE_EDGES))
        self._fresh[kind] += 1
        if self._fresh[kind] < REFRESH:
            return False
        self._fresh[kind] = 0
        self._rank(kind)
        return True

    def _rank(self, kind: int) -> None:
        first = kind * CONTEXT_CLASSES
        rank_kind(self.counts[kind], AGE_EDGES, WORTH, self.ranks[first : first + CONTEXT_CLASSES])
