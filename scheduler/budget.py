"""How many drafts are asked for and how many are verified: the one place where k is decided.

    next_phase   after a step: are the shards to propose, only to commit, or to be left alone?
    cut          before a step: of the drafts that came, which are verified
    verify, draft, settled      what it cost, and what stood

A step of n sequences emits n tokens and one more for each draft that stands, in the time of the draft phase
and of a verify step of so many rows. Drafts are taken in order of their chance, across all sequences, as far
as the expected tokens per millisecond are most. What the drafts above each chance would have given is
remembered, and so it is known for any number of sequences whether proposing pays at all:

    DRAFTING --does not pay--> RESTING --pays for the sequences there are now, or time to look--> (WARMING)
       ^                                                                                              |
       '---------------------------- pays, else RESTING for twice as long <------- PROBING <----------'

While it rests nobody proposes. In a short rest contexts are kept, by phases that only commit; in a long one
they lapse, for a phase in each step is what a drafter that does not pay must not cost. Contexts begin again
in WARMING, some steps before drafts are looked at, so that these are not judged by an empty context.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np

from .cost import CostModel, Floats
from .survival import Offers, Survival, Verified

_NUM_BINS = 16  # of chances, in what drafts would have given
_FIRST_ROWS = 8  # drafts in the first steps of a drafter
_RAMP_STEPS = 3  # steps after which it may be twice as many
_MIN_PHASES = 4  # of DRAFTING before it is judged
_STOP_BELOW = 0.995  # expected speed, against none, at which DRAFTING ends
_START_ABOVE = 1.03  # and at which it begins again
_FIRST_REST = 32  # steps
_LONGEST_REST = 128
_KEPT_REST = 32  # a rest longer than this lets contexts lapse
_PROVEN = 64  # phases of DRAFTING after which the next rest is a first one again
_NUM_WARMING = 16  # steps
_NUM_PROBES = 2  # phases of a probe in which nothing stands
_MOST_PROBES = 8
_LEAST_MS = 1e-9  # while nothing is known of costs
_PROBE_ROWS = 4  # drafts that a probe verifies whatever they promise


class Phase(Enum):
    """What the shards are asked for after a step."""

    NONE = "none"
    COMMIT = "commit"
    PROPOSE = "propose"


class Mode(Enum):
    """Where the budget stands."""

    DRAFTING = "drafting"
    RESTING = "resting"
    WARMING = "warming"
    PROBING = "probing"


class DraftBudget:
    """Owns what is known of costs and chances. Times go in as numbers: it has no clock."""

    def __init__(self) -> None:
        self.verify = CostModel()  # by rows
        self.draft = CostModel()  # by blocks
        self.restart()

    def restart(self) -> None:
        """Another drafter: of its chances nothing is known. What steps cost stays true."""
        self.mode = Mode.DRAFTING
        self.survival = Survival()
        self._returns = _Returns()
        self._rest = _FIRST_REST
        self._num_cuts = 0
        self._num_left = 0  # steps of this mode
        self._num_phases = 0  # that proposed, in this mode
        self._probe_stood = 0
        self._num_probes = 0

    @property
    def lapses(self) -> bool:
        """Whether contexts are to be dropped."""
        return self.mode is Mode.RESTING and self._rest > _KEPT_REST

    def next_phase(self, num_sequences: int, num_drafting: int, keeps_context: bool) -> Phase:
        """Decide the phase after a step; so many sequences decode, and so many of them could draft."""
        idle = Phase.NONE if self.lapses or not keeps_context else Phase.COMMIT
        if num_drafting == 0:
            return idle
        if self.mode is Mode.DRAFTING:
            if self._num_phases >= _MIN_PHASES and self._speed(num_sequences, num_drafting) < _STOP_BELOW:
                self._end_drafting()
        elif self.mode is Mode.PROBING:
            if self._num_left == 0 or (self._num_phases >= _NUM_PROBES and self._probe_stood == 0):
                self._end_probe(num_sequences, num_drafting)
        else:
            self._num_left -= 1
            pays = self.mode is Mode.RESTING and self._speed(num_sequences, num_drafting) > _START_ABOVE
            if pays or self._num_left <= 0:
                self._wake(keeps_context, pays)
        if self.mode in (Mode.DRAFTING, Mode.PROBING):
            self._num_phases += 1
            self._num_left -= self.mode is Mode.PROBING
            return Phase.PROPOSE
        return Phase.NONE if self.lapses or not keeps_context else Phase.COMMIT

    def cut(self, offers: Offers, num_asked: int, num_certain: int, num_rows: int) -> list[int]:
        """How many drafts of each offer are verified.

        `num_asked` blocks were asked for; the step has `num_certain` rows besides, among them one for each
        offer, and room for `num_rows` drafts.
        """
        if self._num_cuts < 16 * _RAMP_STEPS:
            num_rows = min(num_rows, _FIRST_ROWS << self._num_cuts // _RAMP_STEPS)
            self._num_cuts += 1
        self.survival.refresh(max(offers.most, default=0))
        chances = self.survival.products(offers)
        rising = np.sort(chances[chances > 0.0])
        gains = np.concatenate(([0.0], rising[::-1].cumsum()))  # of the best, the best two, ...
        self._returns.take(rising, gains, num_asked)
        num_taken = self._best_cut(gains[: num_rows + 1], len(chances), num_asked, num_certain)
        if self.mode is Mode.PROBING and num_taken < _PROBE_ROWS:
            return self._probe((chances > 0.0).sum(1).tolist(), min(_PROBE_ROWS, num_rows))
        if num_taken == 0:
            return [0] * len(chances)
        least = rising[-num_taken]
        cuts = (chances >= least).sum(1)
        if (num_over := int(cuts.sum()) - num_taken) > 0:
            # As likely as the last that fits are more: the first blocks lose theirs.
            cuts[np.flatnonzero((chances == least).any(1))[:num_over]] -= 1
        return cuts.tolist()

    def settled(self, verified: Sequence[Verified]) -> None:
        """Blocks were verified."""
        self._probe_stood += self.survival.learn(verified)

    def _best_cut(self, gains: Floats, num_tokens: int, num_asked: int, num_certain: int) -> int:
        draft_ms = self.draft.estimate(num_asked) + _LEAST_MS
        end = num_certain + len(gains)
        costs = self.verify.table(end)[num_certain:end]
        return int(((num_tokens + gains) / (draft_ms + costs)).argmax())

    def _probe(self, lens: list[int], num_rows: int) -> list[int]:
        """One block, each time another sequence's, whatever it promises."""
        cuts = [0] * len(lens)
        offering = [index for index, num_drafts in enumerate(lens) if num_drafts > 0]
        if offering:
            index = offering[self._num_probes % len(offering)]
            cuts[index] = min(num_rows, lens[index])
            self._num_probes += 1
        return cuts

    def _speed(self, num_sequences: int, num_drafting: int) -> float:
        """Expected tokens per millisecond with drafts, against without."""
        plain_ms = self.verify.estimate(num_sequences)
        if plain_ms <= 0:
            return 1.0  # nothing is known yet
        draft_ms = self.draft.estimate(num_drafting)
        rows, gains = self._returns.rows, self._returns.gains
        costs = draft_ms + self.verify.estimates(num_sequences + num_drafting * rows)
        best = ((num_sequences + num_drafting * gains) / costs).max()
        return float(best) * plain_ms / num_sequences

    def _end_drafting(self) -> None:
        if self._num_phases >= _PROVEN:
            self._rest = _FIRST_REST
        self._enter(Mode.RESTING, self._rest)

    def _end_probe(self, num_sequences: int, num_drafting: int) -> None:
        if self._speed(num_sequences, num_drafting) > _START_ABOVE:
            self._enter(Mode.DRAFTING)
        else:
            self._enter(Mode.RESTING, self._rest)

    def _wake(self, keeps_context: bool, pays: bool) -> None:
        """Look again, at contexts that are there; if it pays there is no need to look."""
        if self.lapses and keeps_context:
            self._enter(Mode.WARMING, _NUM_WARMING)
            return
        self._returns = self._returns if pays else _Returns()
        self._enter(Mode.DRAFTING if pays else Mode.PROBING, _MOST_PROBES)

    def _enter(self, mode: Mode, num_steps: int = 0) -> None:
        if self.mode is Mode.RESTING:
            self._rest = min(_LONGEST_REST, 2 * self._rest)
        self.mode = mode
        self._num_left = num_steps
        self._num_phases = 0
        self._probe_stood = 0


class _Returns:
    """What blocks would give if all drafts above a chance were verified, from none to all of them.

    `rows` and `gains` [edges]: drafts and expected tokens for each block.
    """

    def __init__(self) -> None:
        self._edges = np.linspace(1.0, 0.0, _NUM_BINS + 1)
        self.rows = np.zeros(_NUM_BINS + 1)
        self.gains = np.zeros(_NUM_BINS + 1)
        self._num_taken = 0

    def take(self, rising: Floats, gains: Floats, num_asked: int) -> None:
        """Mix in a phase: the chances of its drafts, and what the best of them give; the older ones fade."""
        if num_asked == 0:
            return
        rows = len(rising) - rising.searchsorted(self._edges)
        self._num_taken += 1
        share = max(1 / self._num_taken, 0.15)
        self.rows += share * (rows / num_asked - self.rows)
        self.gains += share * (gains[rows] / num_asked - self.gains)


def most_drafts(configured: int | None, max_drafts: int) -> int:
    """The k of a shard: what was configured, as far as its proposer goes."""
    return max_drafts if configured is None else min(configured, max_drafts)


def share_rows(wanted: Sequence[int], num_rows: int) -> list[int]:
    """Cut drafts so that they fit into the rows of a step: the longest are cut first."""
    if sum(wanted) <= num_rows:
        return list(wanted)
    level, left = 0, num_rows
    while (num_above := sum(want > level for want in wanted)) <= left and num_above > 0:
        level += 1
        left -= num_above
    return [min(want, level) for want in wanted]
