"""Which drafts stand: those before the first that differs from the target's own draw."""

from collections.abc import Sequence
from operator import ne


def num_standing(drafts: Sequence[int], decided: Sequence[int]) -> int:
    """Leading drafts equal to the decisions. Decision i follows the row before draft i, so it judges it.

    One more token than that is emitted: the decision behind the last draft that stands.
    """
    num = 0
    for differs in map(ne, drafts, decided):
        if differs:
            break
        num += 1
    return num
