"""The target's head as training uses it: frozen, and at will only over the tokens that answers are made of.

A smaller vocabulary makes training faster and changes nothing in serving, which uses the whole head: what is
learned is a state, and no weight belongs to a token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..target import Target
from .blocks import IGNORED


@dataclass(frozen=True, slots=True)
class TrainingHead:
    """V rows of the target's head, and its embedding, both frozen."""

    embedding: Tensor  # [vocab, H]
    weight: Tensor  # [V, H]
    class_of: Tensor  # int64 [vocab]: a token's row, or IGNORED

    @classmethod
    def of(cls, target: Target, counts: Tensor, max_vocab: int, dtype: torch.dtype) -> "TrainingHead":
        """The `max_vocab` most frequent tokens by `counts` [vocab]; 0: all."""
        embedding = target.embedding.to(dtype)
        head = embedding if target.head is None else target.head.to(dtype)
        vocab_size = target.vocab_size
        if not 0 < max_vocab < vocab_size:
            return cls(embedding, head, torch.arange(vocab_size, device=head.device))
        order = counts.argsort(descending=True, stable=True)
        kept = order[:max_vocab].sort().values.to(head.device)
        class_of = torch.full((vocab_size,), IGNORED, device=head.device)
        class_of[kept] = torch.arange(max_vocab, device=head.device)
        return cls(embedding, head[kept].contiguous(), class_of)

    def classes(self, token_ids: Tensor) -> Tensor:
        """Rows of the head for labels of any shape; IGNORED stays, and is what a token without a row gets."""
        return torch.where(token_ids == IGNORED, IGNORED, self.class_of[token_ids.clamp(min=0)])
