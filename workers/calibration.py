"""What steps cost here, measured before a rank is ready, so that the first decisions are no guesses."""

import time
from collections.abc import Callable

from ..cluster.messages import Chunk

_SIZES = (1, 8, 32)  # rows: one token, a block, a batch
_NUM_TIMED = 3  # of each size, after one that is not: the first of a size is the slowest


def time_steps(run: Callable[[list[Chunk]], object], num_known: int) -> list[tuple[int, float]]:
    """(rows, milliseconds) of steps that compute the last rows of sequence 0 again and decide each.

    The sequence has `num_known` tokens, computed already. How many steps there are does not depend on how
    long they take: every rank of a group runs the same ones.
    """
    step_costs: list[tuple[int, float]] = []
    for num_rows in _SIZES:
        if num_rows > num_known:
            break
        chunk = Chunk(0, num_known - num_rows, num_rows, [], [], num_rows)
        run([chunk])
        for _ in range(_NUM_TIMED):
            began = time.perf_counter()
            run([chunk])
            step_costs.append((num_rows, 1e3 * (time.perf_counter() - began)))
    return step_costs
