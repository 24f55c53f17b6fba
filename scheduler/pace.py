"""How many prompt rows may join a decode step, so that those who decode do not wait longer than they should.

    began     a step of so many rows was planned: the time since the last plan is what that one took, with its
              draft phase and all that passed between
    rested    nobody is served: the time until the next plan says nothing
    room      the most prompt rows beside so many others for which the next plan comes within the target

Only when a prompt is read depends on it, never a token.
"""

from collections.abc import Sequence

from .cost import CostModel

_MARGIN = 0.9  # of the target: costs are medians, and half of the steps take longer
_GROWTH = 2  # times the largest step that is known, and no more, is tried
_FIRST_ROWS = 32  # that are tried while nothing is known


class Pace:
    """Owns what steps took by their rows. Without a target it learns nothing and limits nothing."""

    def __init__(self, target_ms: float | None, least_rows: int) -> None:
        """A prompt gets `least_rows` in each step even if the target is missed, or it would never be read."""
        self._target_ms = target_ms
        self._least_rows = least_rows
        self._costs = CostModel()
        self._last: tuple[int, float] | None = None  # rows of the step in flight, and when it was planned

    def learn(self, step_costs: Sequence[tuple[int, float]]) -> None:
        """Begin with what was measured elsewhere: (rows, milliseconds)."""
        if self._target_ms is not None:
            for num_rows, cost_ms in step_costs:
                self._costs.observe(num_rows, cost_ms)

    def began(self, num_rows: int, now: float) -> None:
        if self._target_ms is None:
            return
        if self._last is not None:
            last_rows, last_at = self._last
            self._costs.observe(last_rows, 1e3 * (now - last_at))
        self._last = (num_rows, now)

    def rested(self) -> None:
        self._last = None

    def room(self, num_others: int, num_rows: int) -> int:
        """Of `num_rows` prompt rows, those that may join `num_others` rows of sequences that decode."""
        if self._target_ms is None or num_others == 0 or num_rows <= self._least_rows:
            return num_rows
        last = min(num_others + num_rows, max(_FIRST_ROWS, _GROWTH * self._costs.largest))
        costs = self._costs.table(last)
        most = int(costs[: last + 1].searchsorted(_MARGIN * self._target_ms, side="right")) - 1
        return min(num_rows, max(self._least_rows, most - num_others))
