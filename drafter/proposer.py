"""What a shard asks of whatever drafts, and how a draft that fails is contained."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from ..cluster.messages import Commit, Draft, Open, Propose, Slide

_log = logging.getLogger(__name__)


class Proposer(Protocol):
    """A source of drafts for the sequences of a shard. It decides nothing: pages and k come with messages.

    Raises ProtocolError for a message that contradicts what it holds.
    """

    @property
    def max_drafts(self) -> int:
        """The most drafts it makes behind an anchor."""
        ...

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        """Target blocks whose tap rows it reads; without any it keeps no context, and commits never come."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def max_context_len(self) -> int:
        """Rows of context beyond which more of them change no draft."""
        ...

    def open(self, opened: Open) -> None: ...

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        """Append tap rows to contexts; all commits are of one step, whose rows are `taps` [rows, taps, H]."""
        ...

    def slide(self, slide: Slide) -> None: ...

    def free(self, sequence_id: int) -> None:
        """Forget a sequence; one that is not here is ignored."""
        ...

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        """One draft per proposal, in order, of at most num_drafts (1 .. max_drafts) tokens."""
        ...

    def check(self) -> None:
        """Raise AssertionError where the invariants do not hold."""
        ...


def draft_contained(
    draft: Callable[[Sequence[Propose]], list[Draft]], proposals: Sequence[Propose]
) -> list[Draft]:
    """All in one forward; if that fails, one by one; what fails alone becomes an empty draft.

    `draft` must be repeatable: it changes nothing but scratch.
    """
    try:
        return draft(proposals)
    except RuntimeError as error:  # what torch raises, out of memory included
        _log.warning("drafting for %d sequences failed: %s", len(proposals), error)
    if len(proposals) == 1:
        return [Draft(proposals[0].sequence_id, [], [], "failed")]
    return [single for proposal in proposals for single in draft_contained(draft, [proposal])]
