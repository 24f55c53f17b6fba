"""A sequence's tokens as a proposer knows them, from Open and every Propose since."""

import numpy as np
from numpy.typing import NDArray

from ..cluster.errors import ProtocolError
from ..cluster.messages import Open, Propose

_FIRST_CAPACITY = 256


class History:
    """Tokens that only grow; drafts never enter it, so nothing is ever taken back."""

    def __init__(self, opened: Open) -> None:
        self.params = opened.params
        self.prompt_len = opened.prompt_len
        self._len = len(opened.token_ids)
        self._memory: NDArray[np.int64] = np.zeros(max(_FIRST_CAPACITY, 2 * self._len), np.int64)
        self._memory[: self._len] = opened.token_ids

    def __len__(self) -> int:
        return self._len

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """[len]; a view that the next `extend` leaves as it was."""
        return self._memory[: self._len]

    def extend(self, token_ids: list[int]) -> None:
        end = self._len + len(token_ids)
        if end > len(self._memory):
            self._memory = np.concatenate([self._memory, np.zeros(end, np.int64)])
        self._memory[self._len : end] = token_ids
        self._len = end


class Histories:
    """The histories of all sequences of a shard."""

    def __init__(self) -> None:
        self._histories: dict[int, History] = {}

    def __getitem__(self, sequence_id: int) -> History:
        history = self._histories.get(sequence_id)
        if history is None:
            raise ProtocolError(f"sequence {sequence_id} is not on this shard")
        return history

    def open(self, opened: Open) -> None:
        if opened.sequence_id in self._histories:
            raise ProtocolError(f"sequence {opened.sequence_id} was opened twice")
        self._histories[opened.sequence_id] = History(opened)

    def extend(self, proposal: Propose) -> History:
        """Take in a proposal's new tokens, the anchor last."""
        if not proposal.new_tokens:
            raise ProtocolError(f"sequence {proposal.sequence_id}: a proposal without an anchor")
        history = self[proposal.sequence_id]
        history.extend(proposal.new_tokens)
        return history

    def free(self, sequence_id: int) -> None:
        self._histories.pop(sequence_id, None)
