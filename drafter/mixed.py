"""Two proposers for the same sequences: the network, and prompt lookup where that promises more.

    judge    what both drafted last, by the tokens that came since: so the chances of a confidence are learned
    lookup   costs nothing, so it is asked for every sequence
    network  runs for the sequences whose lookup does not promise more than the network has of late
    choose   of the two drafts the one with the more expected tokens

Both are judged by what the target emitted, also where the other's draft was verified, so neither is believed
less for not being chosen. Contexts are the network's: commits and slides go to it for every sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..cluster.messages import Commit, Draft, Open, Propose, Slide
from .dflash_proposer import DFlashProposer
from .ngram import MAX_DRAFTS, NgramProposer

_NUM_BINS = 10  # of confidence
_PRIOR = 4.0  # trials that a proposer's own word is worth
_FADE = 0.999  # of what was seen, per trial of the same confidence
_SEQUENCE_FADE = 0.7  # of what the network promised a sequence, per block it drafted


class Calibration:
    """How often a proposer's drafts of each confidence stood, given that those before them did."""

    def __init__(self) -> None:
        self._tried = [_PRIOR] * _NUM_BINS
        self._stood = [_PRIOR * (b + 0.5) / _NUM_BINS for b in range(_NUM_BINS)]

    def learn(self, draft: Draft, emitted: Sequence[int]) -> None:
        """Judge a draft by the tokens that followed its anchor, up to the first that it got wrong."""
        for token_id, confidence, truth in zip(draft.token_ids, draft.confidences, emitted, strict=False):
            b = _bin(confidence)
            self._tried[b] = self._tried[b] * _FADE + 1
            self._stood[b] = self._stood[b] * _FADE + (token_id == truth)
            if token_id != truth:
                return

    def chances(self, draft: Draft) -> list[float]:
        """Of each draft that it stands if those before it do."""
        return [self._stood[b] / self._tried[b] for b in map(_bin, draft.confidences)]


@dataclass(slots=True)
class _Sequence:
    """What is remembered of a sequence between two blocks."""

    last: list[tuple[Calibration, Draft]] = field(default_factory=list)
    promised: float | None = None  # tokens the network is expected to add to a block; None: never asked


class MixedProposer:
    """Implements `proposer.Proposer` over a network and a lookup of the same sequences."""

    def __init__(self, network: DFlashProposer) -> None:
        self._network = network
        # A match may go on for longer than a network of short blocks drafts.
        self._lookup = NgramProposer(max(network.max_drafts, MAX_DRAFTS))
        self._of_network = Calibration()
        self._of_lookup = Calibration()
        self._sequences: dict[int, _Sequence] = {}

    @property
    def max_drafts(self) -> int:
        return self._lookup.max_drafts

    @property
    def tap_layer_ids(self) -> tuple[int, ...]:
        return self._network.tap_layer_ids

    @property
    def num_pages(self) -> int:
        return self._network.num_pages

    @property
    def max_context_len(self) -> int:
        return self._network.max_context_len

    def open(self, opened: Open) -> None:
        self._network.open(opened)
        self._lookup.open(opened)
        self._sequences[opened.sequence_id] = _Sequence()

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:
        self._network.commit(commits, taps)

    def slide(self, slide: Slide) -> None:
        self._network.slide(slide)

    def free(self, sequence_id: int) -> None:
        self._network.free(sequence_id)
        self._lookup.free(sequence_id)
        self._sequences.pop(sequence_id, None)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        self._network.take(proposals)
        self._judge(proposals)
        looked_up = self._lookup.propose(proposals, num_drafts)
        needed = [
            proposal
            for proposal, found in zip(proposals, looked_up, strict=True)
            if self._may_do_better(proposal.sequence_id, found)
        ]
        num_thought = min(num_drafts, self._network.max_drafts)
        thought = {draft.sequence_id: draft for draft in self._network.draft(needed, num_thought)}
        return [self._choose(found, thought.get(found.sequence_id)) for found in looked_up]

    def check(self) -> None:
        self._network.check()

    def _judge(self, proposals: Sequence[Propose]) -> None:
        for proposal in proposals:
            sequence = self._sequences[proposal.sequence_id]
            for calibration, draft in sequence.last:
                calibration.learn(draft, proposal.new_tokens)
            sequence.last.clear()

    def _may_do_better(self, sequence_id: int, found: Draft) -> bool:
        """Whether the network is worth its forward, by what it promised this sequence of late."""
        promised = self._sequences[sequence_id].promised
        return promised is None or promised >= expected_tokens(self._of_lookup.chances(found))

    def _choose(self, found: Draft, thought: Draft | None) -> Draft:
        sequence = self._sequences[found.sequence_id]
        sequence.last.append((self._of_lookup, found))
        lookup_chances = self._of_lookup.chances(found)
        if thought is None:
            return Draft(found.sequence_id, found.token_ids, lookup_chances)
        if thought.outcome != "drafted":
            return thought  # the scheduler must hear of it
        sequence.last.append((self._of_network, thought))
        network_chances = self._of_network.chances(thought)
        promised, previous = expected_tokens(network_chances), sequence.promised
        sequence.promised = (
            promised if previous is None else previous + (1 - _SEQUENCE_FADE) * (promised - previous)
        )
        if expected_tokens(lookup_chances) > promised:
            return Draft(found.sequence_id, found.token_ids, lookup_chances)
        return Draft(found.sequence_id, thought.token_ids, network_chances)


def expected_tokens(chances: Sequence[float]) -> float:
    """Drafts expected to stand, of drafts that each stand with this chance if all before them do."""
    total, product = 0.0, 1.0
    for chance in chances:
        product *= chance
        total += product
    return total


def _bin(confidence: float) -> int:
    return min(int(confidence * _NUM_BINS), _NUM_BINS - 1)
