"""Prompt lookup: what followed the last tokens when they stood in the sequence before. Needs no model."""

from collections.abc import Sequence

from torch import Tensor

from ..cluster.errors import ProtocolError
from ..cluster.messages import Commit, Draft, Open, Propose, SamplingParams, Slide

MIN_MATCH_LEN = 2  # the index is by pairs: a single token says little about the next
MAX_MATCH_LEN = 8  # a longer match predicts no better
MAX_DRAFTS = 8  # of a block, where nothing else is said
_MAX_CANDIDATES = 32  # earlier occurrences of the last pair that are compared
# Chance that a draft stands after m matching tokens, m / (m + _DOUBT): what is wanted of it is the order, the
# scheduler corrects the level by what it sees.
_DOUBT = 1.5


class NgramIndex:
    """One sequence's tokens, and for each the last earlier place where the same pair of tokens ended.

    Appending costs the same however long the sequence is.
    """

    def __init__(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        self.params = params
        self._tokens: list[int] = []
        self._last_of_pair: dict[tuple[int, int], int] = {}
        self._previous: list[int] = []  # place -> earlier place whose pair is the same, -1 for none
        self.extend(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = len(self._tokens)
            self._tokens.append(token_id)
            if place == 0:
                self._previous.append(-1)
                continue
            pair = (self._tokens[place - 1], token_id)
            self._previous.append(self._last_of_pair.get(pair, -1))
            self._last_of_pair[pair] = place

    def match(self) -> tuple[int, int]:
        """(place, length) of the longest earlier occurrence of the last tokens; the latest of several.

        `place` is where its last token stands; (-1, 0) if there is none.
        """
        best, best_len = -1, 0
        candidate = self._previous[-1] if self._previous else -1
        for _ in range(_MAX_CANDIDATES):
            if candidate < 0:
                break
            length = self._common_len(candidate)
            if length > best_len:
                best, best_len = candidate, length
            if best_len == MAX_MATCH_LEN:
                break
            candidate = self._previous[candidate]
        return best, best_len

    def continuation(self, place: int, num_tokens: int) -> list[int]:
        """What followed `place`; where it reaches the end it goes on with itself, as a repetition would."""
        period = len(self._tokens) - 1 - place
        return [self._tokens[place + 1 + i % period] for i in range(num_tokens)]

    def _common_len(self, place: int) -> int:
        tokens, last = self._tokens, len(self._tokens) - 1
        length = 0
        while length < MAX_MATCH_LEN and length <= place and tokens[place - length] == tokens[last - length]:
            length += 1
        return length


class NgramProposer:
    """Implements `proposer.Proposer`. It keeps no context: commits, slides and pages never come."""

    def __init__(self, max_drafts: int = MAX_DRAFTS) -> None:
        self.max_drafts = max_drafts
        self.tap_layer_ids: tuple[int, ...] = ()
        self.num_pages = 0
        self.max_context_len = 0
        self._indices: dict[int, NgramIndex] = {}

    def open(self, opened: Open) -> None:
        if opened.sequence_id in self._indices:
            raise ProtocolError(f"sequence {opened.sequence_id} was opened twice")
        self._indices[opened.sequence_id] = NgramIndex(opened.token_ids, opened.params)

    def commit(self, commits: Sequence[Commit], taps: Tensor) -> None:  # noqa: ARG002 - the protocol's signature
        raise ProtocolError("prompt lookup keeps no context to commit to")

    def slide(self, slide: Slide) -> None:
        raise ProtocolError(f"sequence {slide.sequence_id}: prompt lookup keeps no context to slide")

    def free(self, sequence_id: int) -> None:
        self._indices.pop(sequence_id, None)

    def propose(self, proposals: Sequence[Propose], num_drafts: int) -> list[Draft]:
        return [self._propose(proposal, num_drafts) for proposal in proposals]

    def check(self) -> None:
        """Its only state is the tokens, which the scheduler checks."""

    def _propose(self, proposal: Propose, num_drafts: int) -> Draft:
        index = self._indices.get(proposal.sequence_id)
        if index is None:
            raise ProtocolError(f"sequence {proposal.sequence_id} is not on this shard")
        index.extend(proposal.new_tokens)
        place, length = index.match()
        if length < MIN_MATCH_LEN:
            return Draft(proposal.sequence_id, [], [])
        token_ids = _allowed(index.continuation(place, num_drafts), index.params)
        confidences = [(length + i) / (length + i + _DOUBT) for i in range(len(token_ids))]
        return Draft(proposal.sequence_id, token_ids, confidences)


def _allowed(token_ids: list[int], params: SamplingParams) -> list[int]:
    """The drafts before the first that cannot stand."""
    if params.allowed_token_ids is None:
        return token_ids
    allowed = set(params.allowed_token_ids)
    stop = next((i for i, token_id in enumerate(token_ids) if token_id not in allowed), len(token_ids))
    return token_ids[:stop]
