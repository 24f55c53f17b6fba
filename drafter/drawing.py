"""From draft logits to drafted tokens, drawn as the target will draw: same processors, same keyed noise.

Equal distributions would then always agree. What depends on drafts of the same block is not known yet: to
the processors the slots before a draft hold the mask token, which ends no bad word and counts as one token.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cluster.messages import SamplingParams
from ..kernels import filters, noise, penalties, sampling
from .dflash2 import Selector
from .history import History


@torch.inference_mode()
def draw_drafts(
    logits: Tensor,
    states: Tensor,
    histories: Sequence[History],
    mask_token_id: int,
    selector: Selector | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids int64 [n, k] and confidences float32 [n, k] of n blocks, and whether each was finite [n].

    logits [n * k, vocab] float32, consumed; states [n * k, H] are what the selector of DFlash 2 looks at. A
    block's histories end with its anchor.
    """
    num_blocks = len(histories)
    num_drafts = len(logits) // num_blocks
    params = [history.params for history in histories for _ in range(num_drafts)]
    peak = logits.amax(dim=1)  # nan if any is; -inf elsewhere in the row is fine
    is_finite = peak.isfinite().view(num_blocks, num_drafts).all(dim=1)
    if not bool(is_finite.all()):  # drawn all the same, so that shapes do not depend on it
        logits.masked_fill_(~is_finite.repeat_interleave(num_drafts)[:, None], 0)
    _process(logits, params, histories, num_drafts, mask_token_id)
    device = logits.device
    positions = torch.tensor([len(history) for history in histories], device=device)[:, None]
    positions = positions + torch.arange(num_drafts, device=device)  # [n, k]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    seeds = noise.pack_seeds([p.seed for p in params], device)
    if selector is not None:
        anchors = torch.tensor([int(history.token_ids[-1]) for history in histories], device=device)
        ids, confidences = selector.choose(
            states, logits, anchors, temperature[::num_drafts], seeds[::num_drafts], positions
        )
    else:
        is_greedy = all(p.temperature == 0 for p in params)
        _, ids = sampling.draw(logits, None if is_greedy else temperature, seeds, positions.view(-1))
        confidences = _confidences(logits, ids, temperature)
        ids, confidences = ids.view(num_blocks, -1), confidences.view(num_blocks, -1)
    return ids, confidences.nan_to_num(0.0), is_finite


def _process(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[History],
    num_drafts: int,
    mask_token_id: int,
) -> None:
    """Penalties, bias, masks and filters of every row, in place."""
    if any(penalties.has_penalty(history.params) for history in histories):
        contexts = []
        for history in histories:
            tokens = np.append(history.token_ids, [mask_token_id] * (num_drafts - 1))
            contexts += [
                penalties.RowContext(history.params, tokens[: len(history) + slot], history.prompt_len)
                for slot in range(num_drafts)
            ]
        penalties.apply(logits, contexts)
    if any(filters.has_filter(history.params) for history in histories):
        filters.apply(logits, params)


def _confidences(logits: Tensor, ids: Tensor, temperature: Tensor) -> Tensor:
    """The probability of each row's id [R] at its temperature, at 1 where it is 0."""
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    return (scaled.gather(1, ids[:, None]).squeeze(1) - scaled.logsumexp(dim=1)).exp()
