"""What a rank remembers of each sequence: its tokens, its pages, and where it stands in its grammar.

Nothing here ever needs rolling back: a rejected draft's token and K/V are overwritten by the next chunk,
which starts where the accepted ones end; a matcher has only taken what was settled.
"""

import numpy as np
from numpy.typing import NDArray

from ..cluster.errors import ProtocolError
from ..cluster.messages import Admit, Chunk, SamplingParams
from ..kernels.grammar import Grammars, Matcher


class Sequence:
    """One sequence's tokens, pages and parameters.

    `token_ids` [max_len] holds what is known up to the last chunk's end; beyond it the content is stale.
    """

    __slots__ = ("matcher", "num_pages", "pages", "params", "prompt_len", "sequence_id", "token_ids")

    def __init__(self, admit: Admit, max_len: int, page_size: int, matcher: Matcher | None = None) -> None:
        self.sequence_id = admit.sequence_id
        self.params: SamplingParams = admit.params
        self.prompt_len = admit.prompt_len
        self.matcher = matcher  # of its grammar, if it has one
        if len(admit.token_ids) > max_len:
            raise ProtocolError(
                f"sequence {admit.sequence_id}: {len(admit.token_ids)} tokens exceed {max_len}"
            )
        self.token_ids: NDArray[np.int32] = np.zeros(max_len, np.int32)
        self.token_ids[: len(admit.token_ids)] = admit.token_ids
        self.pages: NDArray[np.int64] = np.zeros(-(-max_len // page_size), np.int64)
        self.num_pages = 0

    def extend(self, chunk: Chunk, page_size: int) -> None:
        """Append the chunk's pages and write its tail. Raises ProtocolError where it cannot be right."""
        end = chunk.start + chunk.num_rows
        num_pages = self.num_pages + len(chunk.new_pages)
        if not (
            0 <= chunk.start < end <= len(self.token_ids)
            and len(chunk.tail) <= chunk.num_rows
            and 0 <= chunk.num_decided <= chunk.num_rows
            and num_pages <= len(self.pages)
            and end <= num_pages * page_size
        ):
            raise ProtocolError(
                f"sequence {self.sequence_id}: a chunk of {chunk.num_rows} rows from {chunk.start}, "
                f"{chunk.num_decided} deciding, tail of {len(chunk.tail)}, does not fit {num_pages} pages"
            )
        if chunk.new_pages:
            self.pages[self.num_pages : num_pages] = chunk.new_pages
            self.num_pages = num_pages
        if chunk.tail:
            self.token_ids[end - len(chunk.tail) : end] = chunk.tail


class Sequences:
    """All sequences of a rank."""

    def __init__(self, max_len: int, page_size: int, grammars: Grammars) -> None:
        self._grammars = grammars
        self._max_len = max_len
        self._page_size = page_size
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def release(self, sequence_id: int) -> None:
        if self._sequences.pop(sequence_id, None) is None:
            raise ProtocolError(f"sequence {sequence_id} was released but is not here")

    def admit(self, admit: Admit) -> None:
        if admit.sequence_id in self._sequences:
            raise ProtocolError(f"sequence {admit.sequence_id} was admitted twice")
        grammar = admit.params.grammar
        matcher = None if grammar is None else self._grammars.matcher(grammar)
        self._sequences[admit.sequence_id] = Sequence(admit, self._max_len, self._page_size, matcher)

    def extend(self, chunk: Chunk) -> Sequence:
        sequence = self._sequences.get(chunk.sequence_id)
        if sequence is None:
            raise ProtocolError(f"a chunk names sequence {chunk.sequence_id}, which is not here")
        sequence.extend(chunk, self._page_size)
        return sequence
