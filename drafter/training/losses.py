"""What a drafted place costs: the cross-entropy of its label, at will with the distance from the target's own
distribution at T = 1 beside it.

The target's distribution is recomputed from the state behind its last block, which data keep on demand: a row
there decides the next token, so place a + k of a block at anchor a is judged by the row of place a + k - 1.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cluster.checkpoint import Checkpoint
from .head import Scores
from .shape import TargetShape


def token_losses(scores: Scores, teacher_logits: Tensor | None, share: float) -> Tensor:
    """[R]: (1 - share) * cross-entropy + share * KL(target || drafter), over the columns of `scores`.

    `teacher_logits` [R, C] are the target's in the same columns; None: cross-entropy alone.
    """
    losses = F.cross_entropy(scores.logits, scores.classes, reduction="none")
    if teacher_logits is None:
        return losses
    wanted, found = teacher_logits.log_softmax(-1), scores.logits.log_softmax(-1)
    is_absent = wanted.isinf()  # in both: a column that this row does not have
    distance = torch.where(is_absent, 0.0, wanted.exp() * (wanted - found.masked_fill(is_absent, 0.0)))
    return (1 - share) * losses + share * distance.sum(-1)


class FinalNorm:
    """The norm in front of the target's head. Raises ModelError where the weights are missing."""

    def __init__(self, model_path: Path, device: torch.device) -> None:
        with Checkpoint(model_path) as checkpoint:
            self._weight = checkpoint.tensor("model.norm.weight").float().to(device)
        self._eps = TargetShape.load(model_path).rms_norm_eps

    def __call__(self, states: Tensor) -> Tensor:
        """[.., H] float32, of states behind the last block."""
        return F.rms_norm(states.float(), self._weight.shape, self._weight, self._eps)
