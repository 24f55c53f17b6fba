"""Drafts that a grammar allows: what it forbids is cut off, what it leaves no choice about is added.

Drafts are guesses, so none of this touches a token: it saves rows that could not stand, and finds some that
must. Until the vocabulary is read, drafts are left as they are.
"""

from collections.abc import Sequence

from torch import Tensor

from ..cluster.messages import Commit, Draft, Open, Propose, Slide
from ..kernels.grammar import Grammars, Matcher
from .history import History
from .proposer import Proposer

FORCED_CONFIDENCE = 0.9  # the model may spell what is forced in other tokens


class GrammarProposer:
    """Implements `proposer.Proposer` around another."""

    def __init__(self, proposer: Proposer, grammars: Grammars) -> None:
        self._proposer = proposer
        self._grammars = grammars
        self._histories: dict[int, History] = {}  # of the sequences that have a grammar
        self._matchers: dict[int, Matcher] = {}

    @property
    def max_drafts(self) -> int:
        return self._proposer.max_drafts

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self._proposer.tap_layer_ids

    @property
    def num_pages(self) -> int:
        return self._proposer.num_pages

    @property
    def max_context_len(self) -> int:
        return self._proposer.max_context_len

    def open(self, opened: Open) -> None:
        self._proposer.open(opened)
        if opened.params.grammar is not None:
            self._grammars.load_soon()
            self._histories[opened.sequence_id] = History(opened)

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        self._proposer.commit(commits, taps)

    def slide(self, slide: Slide) -> None:
        self._proposer.slide(slide)

    def free(self, sequence_id: int) -> None:
        self._proposer.free(sequence_id)
        self._histories.pop(sequence_id, None)
        self._matchers.pop(sequence_id, None)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        for proposal in proposals:
            if (history := self._histories.get(proposal.sequence_id)) is not None:
                history.extend(proposal.new_tokens)
        drafts = self._proposer.propose(proposals, num_drafts)
        if not self._histories or not self._grammars.is_loaded:
            return drafts
        return [self._constrained(draft, num_drafts) for draft in drafts]

    def check(self) -> None:
        self._proposer.check()

    def _constrained(self, draft: Draft, num_drafts: int) -> Draft:
        history = self._histories.get(draft.sequence_id)
        if history is None or draft.outcome != "drafted":
            return draft
        matcher = self._matchers.get(draft.sequence_id)
        if matcher is None:
            grammar = history.params.grammar
            assert grammar is not None
            matcher = self._matchers[draft.sequence_id] = self._grammars.matcher(grammar)
        output = history.token_ids[history.prompt_len :]
        num_allowed, forced = matcher.look_ahead(output, draft.token_ids)
        forced = forced[: num_drafts - num_allowed]
        return Draft(
            draft.sequence_id,
            draft.token_ids[:num_allowed] + forced,
            draft.confidences[:num_allowed] + [FORCED_CONFIDENCE] * len(forced),
        )
