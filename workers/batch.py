"""From a plan's chunks to the flat inputs of one step, built with numpy and handed to torch once."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cluster.messages import Chunk
from ..kernels.rows import Rows
from .sequences import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """N rows of S chunks, chunk after chunk; R of them decide a token, P tell how likely the next one was."""

    token_ids: Tensor  # [N] int64
    rows: Rows
    decided: Tensor | None  # [R + P] row indices; None when every row decides
    num_decided: int  # R
    deciders: list[tuple[Sequence, int]]  # [R] (sequence, position of the row)
    scorers: list[tuple[Sequence, int]]  # [P] the same, of rows whose next token is the prompt's own


def build_batch(chunks: Seq[Chunk], sequences: Seq[Sequence], page_size: int, device: torch.device) -> Batch:
    """`sequences[i]` is chunk i's, already extended by it; chunks must not be empty."""
    assert chunks, "a batch needs rows"
    query_lens = [chunk.num_rows for chunk in chunks]
    context_lens = [chunk.start + chunk.num_rows for chunk in chunks]
    page_tables = np.zeros((len(chunks), -(-max(context_lens) // page_size)), np.int64)
    for row, (sequence, context_len) in enumerate(zip(sequences, context_lens, strict=True)):
        num_pages = -(-context_len // page_size)
        page_tables[row, :num_pages] = sequence.pages[:num_pages]
    lens = np.asarray(query_lens, np.int64)
    ends = np.cumsum(lens)
    num_rows = int(ends[-1])
    chunk_of_row = np.repeat(np.arange(len(chunks)), lens)
    positions = np.arange(num_rows) + (np.asarray(context_lens) - ends)[chunk_of_row]
    slots = page_tables[chunk_of_row, positions // page_size] * page_size + positions % page_size
    token_ids = np.concatenate(
        [s.token_ids[c.start : c.start + c.num_rows] for c, s in zip(chunks, sequences, strict=True)]
    )
    deciders = [
        (sequence, position)
        for chunk, sequence, end in zip(chunks, sequences, context_lens, strict=True)
        for position in range(end - chunk.num_decided, end)
    ]
    scored = [_scored(chunk, sequence) for chunk, sequence in zip(chunks, sequences, strict=True)]
    return Batch(
        token_ids=torch.from_numpy(token_ids.astype(np.int64)).to(device),
        rows=Rows(
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_lens=query_lens,
            context_lens=context_lens,
            page_tables=torch.from_numpy(page_tables).to(device),
        ),
        decided=_decided_rows(chunks, ends, num_rows, len(deciders), scored, device),
        num_decided=len(deciders),
        deciders=deciders,
        scorers=[
            (sequence, position)
            for sequence, positions in zip(sequences, scored, strict=True)
            for position in positions
        ],
    )


def _scored(chunk: Chunk, sequence: Sequence) -> range:
    """Positions of a chunk's rows that are asked how likely the prompt's next token was."""
    if sequence.params.prompt_logprobs is None:
        return range(0)
    return range(chunk.start, min(chunk.start + chunk.num_rows, sequence.prompt_len - 1))


def _decided_rows(
    chunks: Seq[Chunk],
    ends: np.ndarray,
    num_rows: int,
    num_decided: int,
    scored: Seq[range],
    device: torch.device,
) -> Tensor | None:
    if num_decided == num_rows and not any(scored):
        return None
    indices = [
        row
        for chunk, end in zip(chunks, ends.tolist(), strict=True)
        for row in range(end - chunk.num_decided, end)
    ]
    indices += [
        end - chunk.num_rows + position - chunk.start
        for chunk, end, positions in zip(chunks, ends.tolist(), scored, strict=True)
        for position in positions
    ]
    return torch.tensor(indices, dtype=torch.int64, device=device)
