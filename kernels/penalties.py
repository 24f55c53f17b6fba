"""What a row's history and request do to its logits before temperature: penalties, then bias, then masks.

* Repetition r, for tokens in prompt or output: a positive logit is divided by r, another is multiplied by it.
* Frequency f and presence p, for tokens in the output: logit - f * count - p.
* Logit bias is added.
* Masked (-inf): everything but the allowed ids; the last token of every bad word whose other tokens end the
  history; the stop tokens while the output is shorter than min_tokens.

A row's history ends with the row's own token, so the rows of a drafted block see the drafts before them.
Everything works on a shard of the vocabulary; ids outside it are somebody else's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..cluster.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a row's logits depend on besides the model."""

    params: SamplingParams
    history: np.ndarray  # token ids up to and with the row's own position, any integer dtype
    prompt_len: int  # how many of them are prompt; the rest is output


def has_penalty(params: SamplingParams) -> bool:
    """Whether `apply` would look at the row at all."""
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or (params.min_tokens and params.stop_token_ids)
    )


def apply(logits: Tensor, contexts: Sequence[RowContext], first_id: int = 0) -> None:
    """Process rows in place: logits float32 [R, V] of ids first_id .. first_id + V - 1, one context per row.

    Rows without any of it cost nothing.
    """
    edits = [
        _edit(row, context, first_id, logits.shape[1])
        for row, context in enumerate(contexts)
        if has_penalty(context.params)
    ]
    if not edits:
        return
    _penalise(logits, [edit for edit in edits if edit.ids.size])
    for edit in edits:
        if edit.allowed is not None:
            allowed = torch.from_numpy(edit.allowed).to(logits.device)
            row = logits[edit.row]
            kept = row[allowed]
            row.fill_(float("-inf"))
            row[allowed] = kept
    masked = [(edit.row, token_id) for edit in edits for token_id in edit.masked]
    if masked:
        rows, ids = torch.tensor(masked, device=logits.device).unbind(1)
        logits[rows, ids] = float("-inf")


@dataclass(frozen=True, slots=True)
class _Edit:
    """A row's changes; ids count from the shard's first."""

    row: int
    ids: np.ndarray  # distinct
    factor: np.ndarray  # float32: repetition penalty, 1 for none
    deduction: np.ndarray  # float32: frequency and presence
    bias: np.ndarray  # float32
    allowed: np.ndarray | None
    masked: list[int]


def _penalise(logits: Tensor, edits: list[_Edit]) -> None:
    """Repetition, frequency and presence, bias: all rows in one gather and one scatter."""
    if not edits:
        return
    rows = np.repeat([edit.row for edit in edits], [edit.ids.size for edit in edits])
    place = torch.from_numpy(rows * logits.shape[1] + np.concatenate([edit.ids for edit in edits]))
    factor, deduction, bias = torch.from_numpy(
        np.stack(
            [
                np.concatenate([edit.factor for edit in edits]),
                np.concatenate([edit.deduction for edit in edits]),
                np.concatenate([edit.bias for edit in edits]),
            ]
        )
    ).to(logits.device)
    place = place.to(logits.device)
    flat = logits.view(-1)
    old = flat[place]
    flat[place] = torch.where(old > 0, old / factor, old * factor) - deduction + bias


def _edit(row: int, context: RowContext, first_id: int, vocab: int) -> _Edit:
    params = context.params
    seen = np.zeros(0, dtype=np.int64)
    if params.repetition_penalty != 1:
        seen = _in_shard(np.unique(context.history).astype(np.int64), first_id, vocab)
    emitted, counts = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if params.presence_penalty or params.frequency_penalty:
        emitted, counts = np.unique(context.history[context.prompt_len :], return_counts=True)
        is_ours = (emitted >= first_id) & (emitted < first_id + vocab)
        emitted, counts = emitted[is_ours].astype(np.int64) - first_id, counts[is_ours]
    biased = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
    values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
    is_ours = (biased >= first_id) & (biased < first_id + vocab)
    biased, values = biased[is_ours] - first_id, values[is_ours]

    ids = np.union1d(np.union1d(seen, emitted), biased)
    factor, deduction, bias = np.ones((3, ids.size), dtype=np.float32) * [[1], [0], [0]]
    factor[np.searchsorted(ids, seen)] = params.repetition_penalty
    deduction[np.searchsorted(ids, emitted)] = params.frequency_penalty * counts + params.presence_penalty
    bias[np.searchsorted(ids, biased)] = values
    allowed = None
    if params.allowed_token_ids is not None:
        allowed = _in_shard(np.array(params.allowed_token_ids, dtype=np.int64), first_id, vocab)
    masked = [t - first_id for t in _masked_ids(context) if first_id <= t < first_id + vocab]
    return _Edit(
        row,
        ids,
        factor.astype(np.float32),
        deduction.astype(np.float32),
        bias.astype(np.float32),
        allowed,
        masked,
    )


def _masked_ids(context: RowContext) -> list[int]:
    params, history = context.params, context.history
    masked: list[int] = []
    if len(history) - context.prompt_len < params.min_tokens:
        masked += params.stop_token_ids
    for word in params.bad_words:
        num_before = len(word) - 1
        if num_before == 0 or (
            len(history) >= num_before and history[len(history) - num_before :].tolist() == word[:-1]
        ):
            masked.append(word[-1])
    return masked


def _in_shard(ids: np.ndarray, first_id: int, vocab: int) -> np.ndarray:
    """The ids of the shard, counted from its first."""
    return ids[(ids >= first_id) & (ids < first_id + vocab)] - first_id
