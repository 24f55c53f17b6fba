"""The token of a row: argmax of processed logits / temperature + keyed noise, over a vocabulary or a shard.

The draw is exact although few tokens get their noise: most are ruled out by their hashed bits, without the
two logarithms. The test errs on the side of drawing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .noise import from_bits, row_keys, uniform_bits

_ARGMAX_BLOCK = 256
_BLOCK_SIZE = 1 << 17  # logits hashed at a time on CPU: what its caches hold


def draw(
    logits: Tensor, temperature: Tensor | None, seeds: Tensor, positions: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """The best value (float32 [R]) and its token id (int64 [R]) of every row; the lowest id wins a tie.

    logits: float32 [R, V], the ids first_id .. first_id + V - 1. temperature: float32 [R], 0 for a row that
    takes the plain argmax, None if all do. seeds: as made by `noise.pack_seeds`. positions: of the tokens
    being decided. A row without a finite logit gives some id of the shard.

    Values of shards compare: `best_of_shards` of shard draws is the draw of the whole row.
    """
    best, ids = argmax(logits)
    if temperature is None:
        return best, ids + first_id
    is_drawn = temperature > 0
    divisor = torch.where(is_drawn, temperature, 1.0)
    k0, k1 = row_keys(seeds, positions)
    noise = from_bits(uniform_bits(k0, k1, ids + first_id))
    # The largest logit, drawn, is the bar that others must reach; nothing reaches that of a greedy row.
    bar = torch.where(is_drawn, best / divisor + noise, best)
    reach = torch.where(is_drawn, bar - (1e-3 + 1e-6 * bar.abs()), float("inf"))
    token_ids = torch.arange(first_id, first_id + logits.shape[1], dtype=torch.int32, device=logits.device)
    found: list[tuple[Tensor, Tensor]] = []
    for rows in _blocks(logits, is_drawn):
        near, columns = _contenders(logits[rows], divisor[rows], reach[rows], k0[rows], k1[rows], token_ids)
        found.append((rows[near], columns))
    row_ids, columns = (torch.cat(parts) for parts in zip(*found, strict=True))
    values = logits[row_ids, columns] / divisor[row_ids]
    values += from_bits(uniform_bits(k0[row_ids], k1[row_ids], columns + first_id))
    return _settle(bar, ids, values, row_ids, columns, first_id)


def draw_all(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """`draw` without pruning: every token's noise is computed. The definition `draw` is tested against."""
    k0, k1 = row_keys(seeds, positions)
    token_ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    noise = from_bits(uniform_bits(k0.unsqueeze(1), k1.unsqueeze(1), token_ids))
    is_drawn = (temperature > 0).unsqueeze(1)
    values = torch.where(
        is_drawn, logits / torch.where(is_drawn, temperature.unsqueeze(1), 1.0) + noise, logits
    )
    best, ids = values.max(dim=1)
    return best, ids + first_id


def best_of_shards(values: Tensor, token_ids: Tensor) -> Tensor:
    """The winning ids [R] of draws over shards, values and token_ids [shards, R]; shards in order of ids."""
    return token_ids.gather(0, values.argmax(dim=0, keepdim=True)).squeeze(0)


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Largest value and its lowest index per row of [R, V]; R values and R int64 indices.

    torch's argmax over a long row is not vectorised on CPU, its amax is: find the block, then the place.
    """
    num_rows, vocab = logits.shape
    whole = vocab - vocab % _ARGMAX_BLOCK
    if whole == 0:
        return logits.max(dim=1)
    blocks = logits[:, :whole].view(num_rows, -1, _ARGMAX_BLOCK) if whole == vocab else None
    if blocks is None:
        blocks = logits[:, :whole].unflatten(1, (-1, _ARGMAX_BLOCK))
    block_best, block = blocks.amax(dim=2).max(dim=1)
    place = blocks[torch.arange(num_rows, device=logits.device), block].argmax(dim=1)
    best, ids = block_best, block * _ARGMAX_BLOCK + place
    if whole < vocab:
        tail_best, tail = logits[:, whole:].max(dim=1)
        is_tail = (tail_best > best) | (tail_best.isnan() & ~best.isnan())
        best, ids = torch.where(is_tail, tail_best, best), torch.where(is_tail, tail + whole, ids)
    return best, ids


def top_logprobs(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural log-probabilities under the unprocessed logits [R, V] of the whole vocabulary.

    Returns the chosen tokens' (float32 [R]), and the ids and log-probabilities of the num_top best, best
    first (int64 and float32 [R, num_top]).
    """
    norm = logits.logsumexp(dim=1, keepdim=True)
    top, top_ids = logits.topk(num_top, dim=1)
    return (logits.gather(1, chosen.unsqueeze(1)) - norm).squeeze(1), top_ids, top - norm


def _blocks(logits: Tensor, is_drawn: Tensor) -> Sequence[Tensor]:
    """Row numbers to hash at a time: on a CPU of drawn rows only; on a GPU of all, so that nothing waits."""
    if logits.device.type != "cpu":
        return (torch.arange(len(logits), device=logits.device),)
    return is_drawn.nonzero().squeeze(1).split(max(1, _BLOCK_SIZE // logits.shape[1]))


def _contenders(
    logits: Tensor, divisor: Tensor, reach: Tensor, k0: Tensor, k1: Tensor, token_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """(row, column) of every logit whose noise may lift it to its row's reach, and a few more.

    -log(u) >= 1 - u, so noise -log(-log(u)) lifts a value to `reach` only where 1 - u <= exp(value - reach).
    """
    gap = uniform_bits(k0.unsqueeze(1), k1.unsqueeze(1), token_ids).neg_().add_(2**24)  # (1 - u) * 2**24
    # Below e^-80 there is no room for any u, and exponentials that are no normal numbers are slow.
    room = (logits / divisor.unsqueeze(1)).sub_(reach.unsqueeze(1)).clamp_(min=-80.0).exp_().mul_(2.0**24)
    row_ids, columns = (gap <= room).nonzero(as_tuple=True)
    return row_ids, columns


def _settle(
    bar: Tensor, ids: Tensor, values: Tensor, row_ids: Tensor, token_ids: Tensor, first_id: int
) -> tuple[Tensor, Tensor]:
    """Best value and id per row, over the row's bar (held by `ids`) and the values drawn."""
    best = bar.scatter_reduce(0, row_ids, values, "amax")
    beyond = torch.iinfo(torch.int64).max
    winners = torch.where(bar == best, ids, beyond)
    contenders = torch.where(values == best[row_ids], token_ids, beyond)
    winners = winners.scatter_reduce(0, row_ids, contenders, "amin")
    return best, torch.where(winners == beyond, ids, winners) + first_id
