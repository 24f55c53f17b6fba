"""The flat batch of one step: what every operation may know about which rows belong to whom."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of S chunks, chunk after chunk; a chunk is consecutive positions of one sequence.

    Chunk c covers positions context_lens[c] - query_lens[c] .. context_lens[c] - 1. Its K/V lives in pages:
    position p in page_tables[c, p // page_size], at offset p % page_size.
    """

    positions: Tensor  # [N] int64, absolute
    slots: Tensor  # [N] int64: page * page_size + offset where the row's K/V is written
    query_lens: list[int]  # [S] rows per chunk
    context_lens: list[int]  # [S] K/V rows that exist once the chunk's own are written
    page_tables: Tensor  # [S, max_pages] int64, right-padded with 0
    hidden_lens: list[int] | None = None  # [S] first keys that no row of the chunk sees; None: all are seen

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.context_lens) == self.page_tables.shape[0]
        assert all(
            0 < rows <= context for rows, context in zip(self.query_lens, self.context_lens, strict=True)
        )
        assert sum(self.query_lens) == self.positions.shape[0] == self.slots.shape[0]
        assert self.hidden_lens is None or all(
            0 <= hidden <= context - rows
            for hidden, context, rows in zip(
                self.hidden_lens, self.context_lens, self.query_lens, strict=True
            )
        )
