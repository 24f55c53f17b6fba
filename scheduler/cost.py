"""What a step costs: milliseconds as a function of its size, learned from the steps there were.

Sizes fall into buckets, exact ones up to 8 and then ever wider. A bucket's cost is the median of its last
steps, so a step that the machine disturbed counts for nothing. Between buckets the cost is a straight line,
and it never falls as the size grows: neighbours that contradict each other are averaged (isotonic regression
by pooling adjacent violators, Ayer et al. 1955).
"""

from bisect import bisect_right
from collections import deque
from statistics import median

import numpy as np
import numpy.typing as npt

_NUM_KEPT = 9  # steps whose median is a bucket's cost
_MIN_STEPS = 3  # below this a bucket says nothing: the first steps of a size are the slowest
_NUM_EXACT = 8  # sizes with a bucket of their own
_GROWTH = 1.25  # of bucket widths beyond
_HOPE = 0.9  # share of a cost that may fall with the size, below the least size known
_DRIFT = 0.02  # a bucket's cost that moved by less is no reason to fit again

Floats = npt.NDArray[np.float64]


class CostModel:
    """Owns the fitted curve. Of what it does not know it hopes the best, so that it gets tried: that a step
    of unknown cost takes no time, that below the least size known most of the cost falls with the size, and
    that beyond the largest it goes on as it rose until there.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, deque[tuple[int, float]]] = {}
        self._fitted: dict[int, float] = {}  # bucket -> its cost when the curve was fitted last
        self._sizes: list[float] = []
        self._costs: list[float] = []
        self._slope = 0.0  # between the ends of the curve
        self._table = np.zeros(0)

    @property
    def largest(self) -> int:
        """The largest size of known cost; 0 while none is."""
        return int(self._sizes[-1]) if self._sizes else 0

    def observe(self, size: int, cost_ms: float) -> None:
        """Learn that a step of this size took so long."""
        if cost_ms <= 0:
            return
        bucket = _bucket_of(size)
        steps = self._buckets.setdefault(bucket, deque(maxlen=_NUM_KEPT))
        steps.append((size, cost_ms))
        if len(steps) < _MIN_STEPS:
            return
        cost = median([cost for _, cost in steps])
        known = self._fitted.get(bucket)
        if known is None or abs(cost - known) > _DRIFT * known:
            self._fit()

    def estimate(self, size: float) -> float:
        """Milliseconds of a step of this size."""
        sizes, costs = self._sizes, self._costs
        if not sizes:
            return 0.0
        if size <= sizes[0]:
            slope = max(self._slope, _HOPE * costs[0] / sizes[0])
            return max(costs[0] - slope * (sizes[0] - size), (1 - _HOPE) * costs[0])
        if size >= sizes[-1]:
            return costs[-1] + self._slope * (size - sizes[-1])
        right = bisect_right(sizes, size)
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return costs[right - 1] + share * (costs[right] - costs[right - 1])

    def estimates(self, sizes: Floats) -> Floats:
        """The same of many sizes."""
        if not self._sizes:
            return np.zeros(len(sizes))
        first, last = self._sizes[0], self._sizes[-1]
        costs = np.interp(sizes, self._sizes, self._costs)
        costs += self._slope * np.maximum(sizes - last, 0.0)
        slope = max(self._slope, _HOPE * self._costs[0] / first)
        return np.where(
            sizes < first,
            np.maximum(costs - slope * (first - sizes), (1 - _HOPE) * self._costs[0]),
            costs,
        )

    def table(self, last: int) -> Floats:
        """Estimates of sizes 0 .. last or more; the same array until the curve changes."""
        if last >= len(self._table):
            self._table = self.estimates(np.arange(2.0 * last + 2))
        return self._table

    def _fit(self) -> None:
        """Pool neighbours until the cost rises with the size."""
        pools: list[
            tuple[float, float, int]
        ] = []  # of buckets: sum of costs x steps, steps, number of buckets
        sizes: list[float] = []
        self._fitted.clear()
        for bucket in sorted(self._buckets):
            steps = self._buckets[bucket]
            if len(steps) < _MIN_STEPS:
                continue
            cost = self._fitted[bucket] = median([cost for _, cost in steps])
            sizes.append(sum(size for size, _ in steps) / len(steps))
            total, weight, number = cost * len(steps), float(len(steps)), 1
            while pools and pools[-1][0] * weight >= total * pools[-1][1]:
                before, more, others = pools.pop()
                total, weight, number = total + before, weight + more, number + others
            pools.append((total, weight, number))
        self._sizes = sizes
        self._costs = [total / weight for total, weight, number in pools for _ in range(number)]
        rise, run = self._costs[-1] - self._costs[0], sizes[-1] - sizes[0]
        self._slope = rise / run if run > 0 else 0.0
        self._table = np.zeros(0)


def _bucket_of(size: int) -> int:
    """Its first size."""
    if size <= _NUM_EXACT:
        return size
    first = _NUM_EXACT + 1
    while size >= (following := max(first + 1, int(first * _GROWTH))):
        first = following
    return first
