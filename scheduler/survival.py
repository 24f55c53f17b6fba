"""How likely a draft is to stand, had those before it stood: its drafter's word, corrected by what is seen.

    of a confidence    stood / tried among drafts of about this confidence, whatever their place in the block
    of a place         the same at one place of the block, drawn to the former while little was tried
    of a sequence      how much better or worse than that its last drafts did, drawn to how all did of late

What is tried is decided by what is believed, so beliefs fade: a place that was given up is tried again.
"""

from collections.abc import Sequence

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


class Survival:
    """Owns what was learned of one drafter, and of each sequence."""

    def __init__(self) -> None:
        self._said = [min((b + 0.5) / _NUM_BINS, 1.0) for b in range(_NUM_BINS + 1)]
        self._tried = [[0.0] * len(self._said) for _ in range(_NUM_PLACES)]
        self._stood = [[0.0] * len(self._said) for _ in range(_NUM_PLACES)]
        self._chances = [list(self._said) for _ in range(_NUM_PLACES)]
        self._all = [0.0, 0.0]  # stood of late, and how many were expected to
        self._shared = 1.0  # how much better than expected all did of late
        self._own: dict[int, tuple[float, float]] = {}  # by sequence id, the same

    def products(self, sequence_id: int, confidences: Sequence[float], num_drafts: int) -> list[float]:
        """The chance that each of the first drafts is emitted: that it stands and all before it do.

        They fall from draft to draft. Confidences that are no chances are not believed: the list is empty.
        """
        stood, expected = self._own.get(sequence_id, _NOTHING)
        factor = (stood + _OWN_PRIOR * self._shared) / (expected + _OWN_PRIOR)
        product = 1.0
        products: list[float] = []
        try:
            for row, confidence in zip(self._chances, confidences[:num_drafts], strict=False):
                chance = row[int(confidence * _NUM_BINS)] * factor
                product *= chance if chance < _MOST else _MOST
                products.append(product)
        except (ValueError, IndexError, OverflowError):
            return []
        return products

    def learn(self, sequence_id: int, confidences: Sequence[float], num_drafts: int, num_stood: int) -> None:
        """So many of the verified drafts stood; those behind the first that did not were never tried."""
        expected = 0.0
        num_tried = num_stood + 1 if num_stood < num_drafts else num_drafts
        for place, confidence in enumerate(confidences[:num_tried]):
            column = int(confidence * _NUM_BINS)
            expected += self._chances[place][column]
            self._tried[place][column] += 1
            if place < num_stood:
                self._stood[place][column] += 1
        num_own, num_expected = self._own.get(sequence_id, _NOTHING)
        self._own[sequence_id] = (num_own * _OWN_FADE + num_stood, num_expected * _OWN_FADE + expected)
        self._all[0] += num_stood
        self._all[1] += expected

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._own.pop(sequence_id, None)

    def refresh(self, num_places: int) -> None:
        """Work out the chances from what was learned, and let it fade; once a step that drafts."""
        self._all = [value * _FAST_FADE for value in self._all]
        self._shared = (self._all[0] + _SHARED_PRIOR) / (self._all[1] + _SHARED_PRIOR)
        if num_places == 0:
            return
        tried = [sum(column) for column in zip(*self._tried[:num_places], strict=True)]
        stood = [sum(column) for column in zip(*self._stood[:num_places], strict=True)]
        beliefs = [
            (s + _PRIOR * said) / (t + _PRIOR) for t, s, said in zip(tried, stood, self._said, strict=True)
        ]
        for place in range(min(num_places, _NUM_PLACES)):
            tried, stood = self._tried[place], self._stood[place]
            self._chances[place] = [
                (s + _PRIOR * belief) / (t + _PRIOR)
                for t, s, belief in zip(tried, stood, beliefs, strict=True)
            ]
            self._tried[place] = [value * _FADE for value in tried]
            self._stood[place] = [value * _FADE for value in stood]
