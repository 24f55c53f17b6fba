"""From the logits of the deciding rows to tokens, with the vocabulary split over the ranks.

A row that asks for no filter and no log-probabilities is drawn on every rank's part and settled by comparing
the ranks' (value, id) pairs. Only the other rows' logits are gathered whole; rank 0 draws those. In both
ways a token depends on logits, parameters, seed and position alone.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ..cluster.messages import Chunk, Decision, PromptScores, TokenLogprobs
from ..kernels import filters, noise, penalties, sampling
from .collectives import Collectives
from .layers import Partition
from .sequences import Sequence

_SCORED_ROWS = 64  # at once: a whole chunk's rows of a large vocabulary are a lot of memory

Decider = tuple[Sequence, int]  # a sequence and the position of the row that decides the token after it


@dataclass(frozen=True, slots=True)
class _Drawn:
    """R tokens: int64 ids, whether the row's logits were finite, and logprobs of the rows that ask."""

    token_ids: Tensor
    is_finite: Tensor
    logprobs: dict[int, TokenLogprobs]


class Sampler:
    """Decides tokens; stateless between calls."""

    def __init__(self, partition: Partition, collectives: Collectives) -> None:
        self._partition = partition
        self._collectives = collectives

    @torch.inference_mode()
    def decide(self, chunks: Seq[Chunk], deciders: Seq[Decider], logits: Tensor) -> list[Decision]:
        """One Decision per chunk that decides; empty on ranks above 0, which must call all the same.

        `logits` [R, num_ids] float32 are this rank's part of the deciders' rows; they are consumed.
        """
        if self._partition.size == 1:
            drawn = _draw_whole(deciders, logits)
        else:
            drawn = self._draw_sharded(deciders, logits)
        return self._decisions(chunks, deciders, drawn) if self._partition.rank == 0 else []

    @torch.inference_mode()
    def score(self, scorers: Seq[Decider], logits: Tensor) -> list[PromptScores]:
        """How likely the token after each of these rows was; the rows of a sequence follow each other.

        `logits` [P, num_ids] are this rank's part of the rows; empty on ranks above 0, which must call too.
        """
        told: list[TokenLogprobs] = []
        for first in range(0, len(scorers), _SCORED_ROWS):
            rows = scorers[first : first + _SCORED_ROWS]
            part = logits[first : first + _SCORED_ROWS]
            whole = part if self._partition.size == 1 else self._gather(part)
            if self._partition.rank == 0:
                tokens = [int(sequence.token_ids[position + 1]) for sequence, position in rows]
                chosen = torch.tensor(tokens, dtype=torch.int64, device=whole.device)
                told += _logprobs(
                    whole, chosen, [sequence.params.prompt_logprobs or 0 for sequence, _ in rows]
                )
        scores: list[PromptScores] = []
        for (sequence, position), logprobs in zip(scorers, told, strict=False):
            if not scores or scores[-1].sequence_id != sequence.sequence_id:
                scores.append(PromptScores(sequence.sequence_id, position + 1, []))
            scores[-1].logprobs.append(logprobs)
        return scores

    def _draw_sharded(self, deciders: Seq[Decider], logits: Tensor) -> _Drawn:
        needs_whole = [_needs_whole(sequence) for sequence, _ in deciders]
        whole = [row for row, needed in enumerate(needs_whole) if needed]
        split = [row for row, needed in enumerate(needs_whole) if not needed]
        token_ids = logits.new_zeros(len(deciders), dtype=torch.int64)
        is_finite = logits.new_ones(len(deciders), dtype=torch.bool)
        logprobs: dict[int, TokenLogprobs] = {}
        if split:
            ids, finite = self._draw_split([deciders[row] for row in split], logits[split])
            token_ids[split], is_finite[split] = ids, finite
        if whole:
            gathered = self._gather(logits[whole])
            if self._partition.rank == 0:
                drawn = _draw_whole([deciders[row] for row in whole], gathered)
                token_ids[whole], is_finite[whole] = drawn.token_ids, drawn.is_finite
                logprobs = {whole[row]: value for row, value in drawn.logprobs.items()}
        return _Drawn(token_ids, is_finite, logprobs)

    def _draw_split(self, deciders: Seq[Decider], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and finiteness [R] from each rank's own best."""
        is_finite = _make_finite(logits)
        values, ids = _draw(deciders, logits, self._partition.first_id)
        # float64 holds a token id and a float32 value exactly.
        shards = self._collectives.all_gather(
            torch.stack([values.double(), ids.double(), is_finite.double()])
        )
        token_ids = sampling.best_of_shards(shards[:, 0], shards[:, 1]).long()
        return token_ids, shards[:, 2].amin(0) > 0

    def _gather(self, logits: Tensor) -> Tensor:
        """[R, num_ids] of each rank -> [R, vocab]."""
        part = self._partition
        padded = torch.nn.functional.pad(logits, (0, part.vocab_stride - part.num_ids))
        shards = self._collectives.all_gather(padded)  # [size, R, stride]
        return shards.permute(1, 0, 2).flatten(1)[:, : part.spec.vocab_size].contiguous()

    def _decisions(self, chunks: Seq[Chunk], deciders: Seq[Decider], drawn: _Drawn) -> list[Decision]:
        token_ids, is_finite = drawn.token_ids.tolist(), drawn.is_finite.tolist()
        vocab_size = self._partition.spec.vocab_size
        decisions: list[Decision] = []
        first = 0
        for chunk in chunks:
            if chunk.num_decided == 0:
                continue
            rows = range(first, first + chunk.num_decided)
            ids = token_ids[rows.start : rows.stop]
            assert all(0 <= token_id < vocab_size for token_id in ids), f"a draw left the vocabulary: {ids}"
            logprobs = [drawn.logprobs[row] for row in rows] if rows.start in drawn.logprobs else None
            matcher = deciders[first][0].matcher
            finite = all(is_finite[rows.start : rows.stop]) and not (matcher is not None and matcher.is_lost)
            decisions.append(Decision(chunk.sequence_id, ids, finite, logprobs))
            first = rows.stop
        return decisions


def _needs_whole(sequence: Sequence) -> bool:
    return filters.has_filter(sequence.params) or sequence.params.logprobs is not None


def _draw_whole(deciders: Seq[Decider], logits: Tensor) -> _Drawn:
    """Draw with the whole vocabulary at hand."""
    is_finite = _make_finite(logits)
    asking = [row for row, (sequence, _) in enumerate(deciders) if sequence.params.logprobs is not None]
    unprocessed = logits[asking] if asking else None  # a copy
    _, token_ids = _draw(deciders, logits, 0)
    logprobs: dict[int, TokenLogprobs] = {}
    if unprocessed is not None:
        nums = [deciders[row][0].params.logprobs or 0 for row in asking]
        logprobs = dict(zip(asking, _logprobs(unprocessed, token_ids[asking], nums), strict=True))
    return _Drawn(token_ids, is_finite, logprobs)


def _draw(deciders: Seq[Decider], logits: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """Processed, filtered and drawn: best value and id [R]. Filters need the whole vocabulary to be here."""
    params = [sequence.params for sequence, _ in deciders]
    if any(penalties.has_penalty(p) for p in params):
        contexts = [
            penalties.RowContext(sequence.params, sequence.token_ids[: position + 1], sequence.prompt_len)
            for sequence, position in deciders
        ]
        penalties.apply(logits, contexts, first_id)
    if any(p.grammar is not None for p in params):
        _mask_by_grammar(deciders, logits, first_id)
    if all(p.temperature == 0 for p in params):
        values, ids = sampling.argmax(logits)
        return values, ids + first_id
    if any(filters.has_filter(p) for p in params):
        filters.apply(logits, params)
    device = logits.device
    return sampling.draw(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        noise.pack_seeds([p.seed for p in params], device),
        torch.tensor([position + 1 for _, position in deciders], dtype=torch.int64, device=device),
        first_id,
    )


def _mask_by_grammar(deciders: Seq[Decider], logits: Tensor, first_id: int) -> None:
    """The rows of one sequence are neighbours: those of a block, or one."""
    row = 0
    for sequence, rows in groupby(deciders, itemgetter(0)):
        positions = [position for _, position in rows]
        if sequence.matcher is not None:
            output = sequence.token_ids[sequence.prompt_len : positions[-1] + 1]
            sequence.matcher.mask(logits[row : row + len(positions)], output, first_id)
        row += len(positions)


def _make_finite(logits: Tensor) -> Tensor:
    """Whether each row is finite [R]; others become zeros, in place, so that drawing stays defined."""
    is_finite = logits.sum(1).isfinite()  # one NaN or infinity spoils the sum
    if not bool(is_finite.all()):
        logits.masked_fill_(~is_finite[:, None], 0)
    return is_finite


def _logprobs(logits: Tensor, chosen: Tensor, nums: Seq[int]) -> list[TokenLogprobs]:
    """Of each row its chosen token's log-probability and its `nums[row]` best."""
    num_top = min(max(nums), logits.shape[1])
    of_chosen, top_ids, top = sampling.top_logprobs(logits, chosen, num_top)
    rows = zip(of_chosen.tolist(), top_ids.tolist(), top.tolist(), nums, strict=True)
    return [
        TokenLogprobs(logprob, list(zip(ids[:num], values[:num], strict=True)))
        for logprob, ids, values, num in rows
    ]
