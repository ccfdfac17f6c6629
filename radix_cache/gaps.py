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

SHARED_GAPS = len(Stop) * PACE_LEVELS  # row of the gaps between uses of nodes that several flows use
GAP_ROWS = SHARED_GAPS + 1

# What is missed must be computed again, and for that long the whole context is held anyway: the *lead*, seconds of
# prefill that a context stands for, is waiting time that costs nothing. Ranks are kept for classes of it, half an
# octave each, and stand for the class's geometric mean; below LEAD_LIMITS[0] it changes little.
LEAD_LIMITS = tuple(2.0 ** (1 + k / 2) for k in range(11))  # 2 s to 64 s
LEAD_CLASSES = len(LEAD_LIMITS) + 1
LEADS: Floats = np.array([0.0, *(limit * 2**0.25 for limit in LEAD_LIMITS)])
RANK_ROWS = GAP_ROWS * LEAD_CLASSES  # those of one kind of gap follow each other

# Lower edges in seconds: everything under 0.25 s is one bin, the last one is open (from 3.2 h).
AGE_EDGES: Floats = np.concatenate(([0.0], 0.25 * 2.0 ** (np.arange(AGE_BINS) / 4)))

# Before anything was seen all bins are equally likely, which is a falling hazard: the order of LRU.
PRIOR = 1.0 / AGE_BINS
# Above this the counts of a row are halved: old traffic fades, and sums stay exact.
MAX_OBSERVED = 8192.0
# A row's ranks are computed anew after this many gaps.
REFRESH = 16


def new_counts() -> Floats:
    """Counts before the first observation, float64, shape ``(GAP_ROWS, AGE_BINS)``."""
    return np.full((GAP_ROWS, AGE_BINS), PRIOR)


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
    """Row of the gap that follows an answer which ended with ``stop`` in a flow of that pace."""
    level = 0
    if pace >= 0:
        level = 1
        for limit in PACE_LIMITS:
            if pace >= limit:
                level += 1
    return int(stop) * PACE_LEVELS + level


def rank_row(row: int, lead_s: float) -> int:
    """Row of the ranks for a kind of gap (``gap_row``, ``SHARED_GAPS``) and a context of that many seconds."""
    level = 0
    for limit in LEAD_LIMITS:
        if lead_s >= limit:
            level += 1
    return row * LEAD_CLASSES + level


def new_pace(pace: float, bin_index: int) -> float:
    """A flow's pace after one more gap."""
    return float(bin_index) if pace < 0 else pace + PACE_WEIGHT * (bin_index - pace)


def count_gap(counts: Floats, row: int, bin_index: int) -> None:
    """Add one observed gap to a row; halve the row when it is full."""
    counts[row, bin_index] += 1.0
    if counts[row].sum() > MAX_OBSERVED:
        for j in range(counts.shape[1]):
            counts[row, j] *= 0.5


def rank_gaps(counts: Floats, edges: Floats, leads: Floats, ranks: Floats) -> None:
    """Rank of each class of lead and age bin, written to ``ranks``: the higher, the longer to be kept.

    With G the Gittins index, ``1 / G`` is the waiting time that a hit costs; the rank is ``lead - 1 / G``, moved up
    by the last edge, which ``1 / G`` never exceeds. Without a lead that is the order of G.

    Args:
        counts: gaps seen per bin, all above 0, shape ``(bins,)``.
        edges: bin edges in seconds, shape ``(bins + 1,)``.
        leads: seconds, shape ``(classes,)``.
        ranks: output in seconds, shape ``(classes, bins)``; never negative.
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
        for j in range(len(leads)):
            ranks[j, b] = edges[bins] + leads[j] - 1 / best


class GapTable:
    """Learned ranks for one cache.

    ``counts[row, bin]`` are gaps seen, with the rows of ``gap_row`` and ``SHARED_GAPS``; ``ranks[row, bin]`` is the
    rank in seconds of a wait of that kind and age, with the rows of ``rank_row``.
    """

    def __init__(self) -> None:
        self.counts = new_counts()
        self.ranks = np.zeros((RANK_ROWS, AGE_BINS))
        self._fresh = np.zeros(GAP_ROWS, dtype=np.int64)
        for row in range(GAP_ROWS):
            self._rank(row)

    def observe(self, row: int, gap_s: float) -> bool:
        """Count one gap, in seconds, between a use and the next; true when the row's ranks changed."""
        count_gap(self.counts, row, age_bin(gap_s, AGE_EDGES))
        self._fresh[row] += 1
        if self._fresh[row] < REFRESH:
            return False
        self._fresh[row] = 0
        self._rank(row)
        return True

    def _rank(self, row: int) -> None:
        first = row * LEAD_CLASSES
        rank_gaps(self.counts[row], AGE_EDGES, LEADS, self.ranks[first : first + LEAD_CLASSES])
