"""The target's head as training uses it: frozen, and at will only over some tokens.

A smaller vocabulary makes training faster and changes nothing in serving, which uses the whole head: what is
learned is a state, and no weight belongs to a token. Tokens that answers use often always take part. Of the
others none does (a place whose label is one of them is not trained on), or a sample, another at every step:
its exponentials, weighted by the inverse of its share, stand for those of all, and the label's own are exact,
so that the sum under the softmax is right in expectation (Bengio and Senecal, 2003).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target import Target
from .blocks import IGNORED
from .network import DrafterNetwork


@dataclass(frozen=True, slots=True)
class Scores:
    """R rows' logits over C classes and the classes of their labels; what is sampled carries its weight."""

    logits: Tensor  # [R, C] float32
    classes: Tensor  # int64 [R]


@dataclass(frozen=True, slots=True)
class TrainingHead:
    """V rows of the target's head, a shuffled tail of the others, and the embedding, all frozen."""

    embedding: Tensor  # [vocab, H]
    weight: Tensor  # [V, H]
    class_of: Tensor  # int64 [vocab]: a token's row in `weight`, V + its row in `tail`, or IGNORED
    tail: Tensor  # [T + num_sampled, H]: its beginning once more behind its end; [0, H] if none is sampled
    num_sampled: int  # rows of the tail at each step

    @classmethod
    def of(
        cls, target: Target, counts: Tensor, max_vocab: int, dtype: torch.dtype, num_sampled: int = 0
    ) -> "TrainingHead":
        """The `max_vocab` most frequent tokens by `counts` [vocab]; 0: all."""
        embedding = target.embedding.to(dtype)
        head = embedding if target.head is None else target.head.to(dtype)
        vocab_size = target.vocab_size
        if not 0 < max_vocab < vocab_size:
            return cls(embedding, head, torch.arange(vocab_size, device=head.device), head[:0], 0)
        order = counts.argsort(descending=True, stable=True)
        kept, others = order[:max_vocab].sort().values, order[max_vocab:]
        class_of = torch.full((vocab_size,), IGNORED)
        class_of[kept] = torch.arange(max_vocab)
        num_sampled = min(num_sampled, len(others))
        if num_sampled:
            others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))]
            class_of[others] = torch.arange(max_vocab, vocab_size)
            tail = head[torch.cat([others, others[:num_sampled]]).to(head.device)]
        else:
            tail = head[:0]
        weight = head[kept.to(head.device)].contiguous()
        return cls(embedding, weight, class_of.to(head.device), tail, num_sampled)

    def classes(self, token_ids: Tensor) -> Tensor:
        """Classes of labels of any shape; IGNORED stays, and is what a token without a row gets."""
        return torch.where(token_ids == IGNORED, IGNORED, self.class_of[token_ids.clamp(min=0)])

    def draw(self, seed: int) -> int:
        """Where in the tail a sample begins."""
        if not self.num_sampled:
            return 0
        tail_len = len(self.tail) - self.num_sampled
        return int(torch.randint(tail_len, (), generator=torch.Generator().manual_seed(seed)))

    def scores(self, network: DrafterNetwork, states: Tensor, classes: Tensor, first: int) -> Scores:
        """Of states [R, H] whose labels have `classes` [R], none IGNORED; `first` as of `draw`.

        The columns are the rows of `weight`, the sample, and the label itself where it is in the tail.
        """
        logits = network.logits(states, self.weight)
        if not self.num_sampled:
            return Scores(logits, classes)
        num_kept, tail_len = len(self.weight), len(self.tail) - self.num_sampled
        sample = self.tail[first : first + self.num_sampled]
        in_tail = classes >= num_kept
        place = (classes - num_kept).clamp(min=0)
        own = network.scaled((states * self.tail[place]).sum(-1, dtype=torch.float32))
        sampled = network.logits(states, sample) + math.log(tail_len / self.num_sampled)
        is_label = (place - first).remainder(tail_len).unsqueeze(1) == torch.arange(
            self.num_sampled, device=place.device
        )
        sampled = sampled.masked_fill(is_label & in_tail.unsqueeze(1), -math.inf)  # it has its own column
        own = own.masked_fill(~in_tail, -math.inf).unsqueeze(1)
        last = num_kept + self.num_sampled
        return Scores(torch.cat([logits, sampled, own], 1), classes.where(~in_tail, last))
