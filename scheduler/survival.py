"""How likely a draft is to stand, had those before it stood: its drafter's word, corrected by what is seen.

    of a confidence    stood / tried among drafts of about this confidence, whatever their place in the block
    of a place         the same at one place of the block, drawn to the former while little was tried
    of a sequence      how much better or worse than that its last drafts did, drawn to how all did of late

What is tried is decided by what is believed, so beliefs fade: a place that was given up is tried again.

Shapes: B blocks, P places of a block, C columns of confidence.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_NUM_BINS = 10  # of confidence, and one more for 1 itself
_NUM_PLACES = 64  # of the block; nothing behind them is verified
_PRIOR = 3.0  # trials that the belief before any trial is worth
_FADE = 0.99  # of what was seen, per step
_FAST_FADE = 0.9  # of what all sequences did of late, per step
_OWN_FADE = 0.9  # of what one sequence did, per block
_SHARED_PRIOR = 4.0  # drafts that no news of late is worth
_OWN_PRIOR = 16.0  # drafts that the shared belief is worth to a sequence
_MOST = 0.995
_NOTHING = (0.0, 0.0)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

Verified = tuple[int, int, int]  # sequence id, drafts verified, how many of them stood


class Offers(NamedTuple):
    """The blocks that came: whose, what their drafters say of each draft, and how many are of use."""

    sequence_ids: Sequence[int]
    confidences: Sequence[Sequence[float]]
    most: Sequence[int]


class Survival:
    """Owns what was learned of one drafter, and of each sequence."""

    def __init__(self) -> None:
        self._said = np.minimum((np.arange(_NUM_BINS + 1) + 0.5) / _NUM_BINS, 1.0)
        self._tried = np.zeros((_NUM_PLACES, len(self._said)))
        self._stood = np.zeros_like(self._tried)
        self._chances = np.tile(self._said, (_NUM_PLACES, 1))
        self._places = np.arange(_NUM_PLACES)
        self._first_cells = self._places * len(self._said)
        self._all = _NOTHING  # how many stood of late, and were expected to
        self._shared = 1.0  # how much better than expected all did of late
        self._own: dict[int, tuple[float, float]] = {}  # by sequence id, the same
        # Of the last offers, for when they have been verified:
        self._rows: dict[int, int] = {}  # by sequence id
        self._lens = np.zeros(0, np.intp)  # [B] drafts of use
        self._cells = np.zeros((0, 0), np.intp)  # [B, P] in tables of [P, C]

    def products(self, offers: Offers) -> Floats:
        """[B, P], the chance of each draft to be emitted: that it stands and all before it do.

        They fall from draft to draft, and are 0 behind the last that is of use. Confidences that are no
        chances are not believed: all of their block is 0.
        """
        own, shared = self._own, _OWN_PRIOR * self._shared
        did = [own.get(sequence_id, _NOTHING) for sequence_id in offers.sequence_ids]
        factors = np.array([(stood + shared) / (expected + _OWN_PRIOR) for stood, expected in did])
        confidences = self._take(offers)
        num_places = confidences.shape[1]
        self._cells = (confidences * _NUM_BINS).astype(np.intp) + self._first_cells[:num_places]
        chances = self._chances.take(self._cells)
        chances *= factors[:, None]
        np.minimum(chances, _MOST, out=chances)
        chances *= self._places[:num_places] < self._lens[:, None]
        return np.multiply.accumulate(chances, axis=1, out=chances)

    def learn(self, verified: Sequence[Verified]) -> int:
        """What became of the last offers; those behind the first that did not stand were never tried.

        Returns how many drafts stood.
        """
        rows_of, own = self._rows, self._own
        known = [block for block in verified if block[0] in rows_of]
        rows = [rows_of[block[0]] for block in known]
        cells, num_stood = self._cells[rows], np.array([block[2] for block in known], np.intp)
        num_tried = np.minimum(num_stood + 1, [block[1] for block in known])
        num_tried = np.minimum(num_tried, self._lens[rows])
        is_tried = self._places[: cells.shape[1]] < num_tried[:, None]
        num_stood = np.minimum(num_stood, num_tried)
        expected = (self._chances.take(cells) * is_tried).sum(1)
        self._tried += self._count(cells[is_tried])
        self._stood += self._count(cells[self._places[: cells.shape[1]] < num_stood[:, None]])
        for block, stood, chance in zip(known, num_stood.tolist(), expected.tolist(), strict=True):
            own_stood, own_expected = own.get(block[0], _NOTHING)
            own[block[0]] = (own_stood * _OWN_FADE + stood, own_expected * _OWN_FADE + chance)
        num_all = int(num_stood.sum())
        self._all = (self._all[0] + num_all, self._all[1] + float(expected.sum()))
        return num_all

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._rows.pop(sequence_id, None)
        self._own.pop(sequence_id, None)

    def refresh(self, num_places: int) -> None:
        """Work out the chances from what was learned, and let it fade; once a step that drafts."""
        self._all = (self._all[0] * _FAST_FADE, self._all[1] * _FAST_FADE)
        self._shared = (self._all[0] + _SHARED_PRIOR) / (self._all[1] + _SHARED_PRIOR)
        tried, stood = self._tried[:num_places], self._stood[:num_places]
        beliefs = (stood.sum(0) + _PRIOR * self._said) / (tried.sum(0) + _PRIOR)
        self._chances[:num_places] = (stood + _PRIOR * beliefs) / (tried + _PRIOR)
        tried *= _FADE
        stood *= _FADE

    def _take(self, offers: Offers) -> Floats:
        """[B, P], the confidences, with 0 where there is no draft; remembers how many each block has."""
        given = [len(block) for block in offers.confidences]
        num_places = max(given, default=0)
        flat = np.fromiter(chain.from_iterable(offers.confidences), np.float64, sum(given))
        self._rows = {sequence_id: row for row, sequence_id in enumerate(offers.sequence_ids)}
        self._lens = np.minimum(given, offers.most)
        if len(flat) == len(given) * num_places:
            table = flat.reshape(len(given), num_places)
        else:
            table = np.zeros((len(given), num_places))
            table[np.arange(num_places) < np.array(given)[:, None]] = flat
        if not (flat.min(initial=0.0) >= 0.0 and flat.max(initial=0.0) <= 1.0):  # or one is not a number
            is_chance = (table >= 0.0) & (table <= 1.0)
            self._lens[~is_chance.all(1)] = 0
            table = np.where(is_chance, table, 0.0)
        return table[:, :_NUM_PLACES]

    def _count(self, cells: Ints) -> Ints:
        return np.bincount(cells, minlength=self._tried.size).reshape(self._tried.shape)
