"""How likely a draft is to stand, had those before it stood: its drafter's word, corrected by what is seen.

    of a confidence    stood / tried among drafts of about this confidence, whatever their place in the block
    of a place         the same at one place of the block, drawn to the former while little was tried
    of a sequence      how much better or worse than that its last drafts did, drawn to how all did of late

What is tried is decided by what is believed, so beliefs fade: a place that was given up is tried again.

Shapes: B blocks, P places of a block, C columns of confidence.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

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
_STRANGER = 0  # the slot of those of whom nothing is known

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]

Offer = tuple[int, Sequence[float], int]  # sequence id, confidences of its drafts, most that are of use
Verified = tuple[int, int, int]  # sequence id, drafts verified, how many of them stood


class Survival:
    """Owns what was learned of one drafter, and of each sequence."""

    def __init__(self) -> None:
        self._said = np.minimum((np.arange(_NUM_BINS + 1) + 0.5) / _NUM_BINS, 1.0)
        self._tried = np.zeros((_NUM_PLACES, len(self._said)))
        self._stood = np.zeros_like(self._tried)
        self._chances = np.tile(self._said, (_NUM_PLACES, 1))
        self._all = np.zeros(2)  # stood of late, and how many were expected to
        self._shared = 1.0  # how much better than expected all did of late
        self._own = np.zeros((64, 2))  # by slot, the same of one sequence
        self._slots: dict[int, int] = {}  # by sequence id
        self._free = list(range(len(self._own) - 1, _STRANGER, -1))
        # Of the last offers, for when they have been verified:
        self._rows: dict[int, int] = {}  # by sequence id
        self._lens = np.zeros(0, np.intp)  # [B]
        self._cells = np.zeros((0, 0), np.intp)  # [B, P], in tables of [P, C]

    def products(self, offers: Sequence[Offer]) -> Floats:
        """[B, P], the chance of each draft to be emitted: that it stands and all before it do.

        They fall from draft to draft, and are 0 behind the last that is of use. Confidences that are no
        chances are not believed: all of their block is 0.
        """
        num_blocks = len(offers)
        sequence_ids = [offer[0] for offer in offers]
        confidences, self._lens = _table([offer[1] for offer in offers], [offer[2] for offer in offers])
        columns = (confidences * _NUM_BINS).astype(np.intp)
        self._cells = columns + np.arange(columns.shape[1]) * len(self._said)
        self._rows = dict(zip(sequence_ids, range(num_blocks), strict=True))
        slots = self._slots
        own = self._own[[slots.get(sequence_id, _STRANGER) for sequence_id in sequence_ids]]
        factors = (own[:, 0] + _OWN_PRIOR * self._shared) / (own[:, 1] + _OWN_PRIOR)
        chances = np.minimum(self._chances.take(self._cells) * factors[:, None], _MOST)
        chances *= _before(self._lens, columns.shape[1])
        return np.multiply.accumulate(chances, axis=1)

    def learn(self, verified: Iterable[Verified]) -> int:
        """What became of the last offers; those behind the first that did not stand were never tried.

        Returns how many drafts stood.
        """
        known = [(self._rows[v[0]], *v) for v in verified if v[0] in self._rows]
        if not known:
            return 0
        rows, sequence_ids, num_drafts, num_stood = np.array(known, np.intp).T
        num_tried = np.minimum(np.minimum(num_stood + 1, num_drafts), self._lens[rows])
        cells = self._cells[rows]
        tried = _before(num_tried, cells.shape[1])
        stood = _before(np.minimum(num_stood, num_tried), cells.shape[1])
        self._tried += self._count(cells[tried])
        self._stood += self._count(cells[stood])
        news = np.empty((len(rows), 2))
        news[:, 0] = np.minimum(num_stood, num_tried)
        news[:, 1] = (self._chances.take(cells) * tried).sum(1)
        slots = [self._slot(sequence_id) for sequence_id in sequence_ids.tolist()]
        self._own[slots] = self._own[slots] * _OWN_FADE + news
        self._all += news.sum(0)
        return int(num_stood.sum())

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._rows.pop(sequence_id, None)
        if (slot := self._slots.pop(sequence_id, None)) is not None:
            self._own[slot] = 0.0
            self._free.append(slot)

    def refresh(self, num_places: int) -> None:
        """Work out the chances from what was learned, and let it fade; once a step that drafts."""
        self._all *= _FAST_FADE
        self._shared = float((self._all[0] + _SHARED_PRIOR) / (self._all[1] + _SHARED_PRIOR))
        tried, stood = self._tried[:num_places], self._stood[:num_places]
        beliefs = (stood.sum(0) + _PRIOR * self._said) / (tried.sum(0) + _PRIOR)
        self._chances[:num_places] = (stood + _PRIOR * beliefs) / (tried + _PRIOR)
        tried *= _FADE
        stood *= _FADE

    def _count(self, cells: Ints) -> Floats:
        return np.bincount(cells, minlength=self._tried.size).reshape(self._tried.shape)

    def _slot(self, sequence_id: int) -> int:
        slot = self._slots.get(sequence_id)
        if slot is None:
            if not self._free:
                size = len(self._own)
                self._own = np.concatenate((self._own, np.zeros_like(self._own)))
                self._free += range(2 * size - 1, size - 1, -1)
            slot = self._slots[sequence_id] = self._free.pop()
        return slot


def _table(confidences: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[Floats, Ints]:
    """[B, P] with 0 where there is no draft of use, and [B] how many of use each block has."""
    given = np.fromiter(map(len, confidences), np.intp, len(confidences))
    flat = np.fromiter(chain.from_iterable(confidences), np.float64, int(given.sum()))
    num_places = int(given.max(initial=0))
    if flat.size == given.size * num_places:
        table = flat.reshape(len(given), num_places)
    else:
        table = np.zeros((len(given), num_places))
        table[_before(given, num_places)] = flat
    table = table[:, :_NUM_PLACES]
    lens = np.minimum(np.minimum(given, most), _NUM_PLACES)
    of_use = _before(lens, table.shape[1])
    is_chance = (table >= 0.0) & (table <= 1.0)
    if not is_chance.all():
        lens[(of_use & ~is_chance).any(1)] = 0
        of_use = _before(lens, table.shape[1])
    return np.where(of_use, table, 0.0), lens


def _before(lens: Ints, num_places: int) -> Bools:
    """[B, P], whether a place is among the first so many of its row."""
    return np.arange(num_places) < lens[:, None]
