"""Top-k, top-p and min-p: which tokens a row may draw. They act on logits / temperature, in this order.

Tokens are ranked by logit, largest first, and among equal logits by id, lowest first. Each filter keeps a
leading part of that order:

* top-k keeps min(k, V) tokens; k = 0 keeps all.
* top-p keeps the fewest tokens whose probability, renormalised over what top-k kept, reaches p; at least one.
* min-p keeps tokens with probability >= min_p times the largest; it always keeps the largest.

A token without probability (-inf) is never kept back by a filter's count: it stays -inf.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# How many of the largest logits are looked at before more of the row is: enough for most top-p sets.
_FIRST_PREFIX_LEN = 256


class FilterParams(Protocol):
    """What of a row's sampling parameters concerns the filters."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def has_filter(params: FilterParams) -> bool:
    """Whether a row's whole vocabulary is needed to draw its token."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def apply(logits: Tensor, params: Sequence[FilterParams]) -> None:
    """Set what the rows' filters exclude to -inf, in place; logits float32 [R, V], the whole vocabulary."""
    row_ids = [row for row, row_params in enumerate(params) if has_filter(row_params)]
    if not row_ids:
        return
    asking = [params[row] for row in row_ids]
    index = torch.tensor(row_ids, device=logits.device)
    temperature = torch.tensor([p.temperature for p in asking], dtype=torch.float32, device=logits.device)
    scaled = logits.index_select(0, index) / temperature.unsqueeze(1)
    keep = torch.ones(scaled.shape, dtype=torch.bool, device=logits.device)
    cut = [i for i, p in enumerate(asking) if p.top_k > 0 or p.top_p < 1]
    if cut:
        _keep_leading(scaled, keep, cut, asking)
    min_p = [i for i, p in enumerate(asking) if p.min_p > 0]
    if min_p:
        part = scaled[min_p]
        gap = torch.tensor([math.log(asking[i].min_p) for i in min_p], device=logits.device)
        keep[min_p] &= part >= part.amax(dim=1, keepdim=True) + gap.unsqueeze(1)
    logits[index] = logits[index].masked_fill_(~keep, float("-inf"))


def _keep_leading(scaled: Tensor, keep: Tensor, rows: list[int], params: Sequence[FilterParams]) -> None:
    """Clear `keep` [R, V] outside the leading tokens that top-k and top-p leave, for the given rows."""
    prefix_len = max(_FIRST_PREFIX_LEN, *(params[row].top_k for row in rows))
    while rows:
        prefix_len = min(prefix_len, scaled.shape[1])
        part = scaled[rows]
        top = part.topk(prefix_len, dim=1).values  # [R, prefix], sorted
        count, is_settled = _leading_count(part, top, [params[row] for row in rows])
        done = [i for i, settled in enumerate(is_settled) if settled]
        if done:
            keep[[rows[i] for i in done]] = _leading(part[done], top[done], count[done])
        rows = [row for row, settled in zip(rows, is_settled, strict=True) if not settled]
        prefix_len *= 16


def _leading_count(scaled: Tensor, top: Tensor, params: Sequence[FilterParams]) -> tuple[Tensor, list[bool]]:
    """How many leading tokens each row keeps [R], and whether the prefix was long enough to tell."""
    vocab, prefix_len = scaled.shape[1], top.shape[1]
    top_k = torch.tensor([min(p.top_k, vocab) or vocab for p in params], device=scaled.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=scaled.device)
    rank = torch.arange(prefix_len, device=scaled.device)
    head = top.double().masked_fill(rank >= top_k.unsqueeze(1), float("-inf"))
    # Where top-k reaches past the prefix it keeps more than the prefix: the mass is the whole row's.
    norm = torch.where(top_k <= prefix_len, head.logsumexp(dim=1), scaled.double().logsumexp(dim=1))
    mass = (head - norm.unsqueeze(1)).exp().cumsum(dim=1)  # [R, prefix], of the tokens up to each
    is_wanted = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1) < top_p.unsqueeze(1)
    is_wanted[:, 0] = True
    count = torch.where(top_p < 1, is_wanted.sum(dim=1), vocab).minimum(top_k)
    is_known = (top_k <= prefix_len) | ((top_p < 1) & (mass[:, -1] >= top_p)) | (prefix_len == vocab)
    return count, is_known.tolist()


def _leading(scaled: Tensor, top: Tensor, count: Tensor) -> Tensor:
    """Mask [R, V] of each row's `count` leading tokens; `top` [R, prefix] are its largest values, sorted."""
    last = top.gather(1, count.unsqueeze(1) - 1)
    is_above, is_tied = scaled > last, scaled == last
    num_ties_kept = count.unsqueeze(1) - is_above.sum(dim=1, keepdim=True)
    return is_above | (is_tied & (is_tied.cumsum(dim=1) <= num_ties_kept))
