"""What a training batch asks: anchors, the rows of their blocks, labels, and who sees whom.

A block at anchor a has rows a .. a + B - 1: the token at a, then masks. Row j fills position a + j: its label
is the token there. It sees the context rows before a, none at a or behind it (the anchor's tap row does not
exist when a block is drafted), and the rows of its own block, before and behind it; no other block.

Shapes: n sequences, A anchors each, blocks of B, Q = A * B rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -1  # the label behind a sequence's end


@dataclass(frozen=True, slots=True)
class Blocks:
    """A anchors in each of n sequences."""

    anchors: Tensor  # int64 [n, A], positions
    anchor_ids: Tensor  # int64 [n, A], the tokens there
    labels: Tensor  # int64 [n, A, B - 1]; IGNORED where the sequence has ended
    block_len: int  # B

    @classmethod
    def of(cls, token_ids: Tensor, lens: Tensor, anchors: Tensor, block_len: int) -> "Blocks":
        """token_ids [n, L] padded with anything, lens [n], anchors [n, A] below lens - 1."""
        places = anchors.unsqueeze(-1) + torch.arange(1, block_len, device=anchors.device)  # [n, A, B - 1]
        is_there = places < lens[:, None, None]
        inside = places.clamp(max=token_ids.shape[1] - 1).flatten(1)
        labels = token_ids.gather(1, inside).view_as(places).masked_fill(~is_there, IGNORED)
        return cls(anchors, token_ids.gather(1, anchors), labels, block_len)

    def to(self, device: torch.device) -> "Blocks":
        return Blocks(
            self.anchors.to(device), self.anchor_ids.to(device), self.labels.to(device), self.block_len
        )

    @property
    def positions(self) -> Tensor:
        """[n, Q], of every row."""
        rows = torch.arange(self.block_len, device=self.anchors.device)
        return (self.anchors.unsqueeze(-1) + rows).flatten(1)

    def token_ids(self, mask_token_id: int) -> Tensor:
        """[n, Q], what the rows are embedded as."""
        ids = self.anchor_ids.unsqueeze(-1).repeat(1, 1, self.block_len)
        ids[:, :, 1:] = mask_token_id
        return ids.flatten(1)

    def mask(self, num_context: int) -> Tensor:
        """Boolean [n, 1, Q, num_context + Q]: which rows a row sees."""
        num_sequences, num_anchors = self.anchors.shape
        device = self.anchors.device
        place = torch.arange(num_context, device=device)
        before = place < self.anchors.unsqueeze(-1)  # [n, A, S]
        before = before.repeat_interleave(self.block_len, 1)  # [n, Q, S]
        block = torch.arange(num_anchors, device=device).repeat_interleave(self.block_len)  # [Q]
        own = (block[:, None] == block).expand(num_sequences, -1, -1)
        return torch.cat([before, own], -1).unsqueeze(1)


def draw_anchors(prompt_lens: Tensor, lens: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Random places in the answers [n, num_anchors], each at most once while there are enough.

    An anchor is a token of the answer with another behind it. Serving's first anchor is the answer's first
    token, at the prompt's length. `lens` - `prompt_lens` must be at least 2.
    """
    anchors = torch.empty(len(lens), num_anchors, dtype=torch.int64)
    for row, (first, end) in enumerate(zip(prompt_lens.tolist(), (lens - 1).tolist(), strict=True)):
        places = first + torch.randperm(end - first, generator=generator)
        anchors[row] = places.repeat(-(-num_anchors // len(places)))[:num_anchors]
    return anchors


def slot_weights(block_len: int, gamma: float) -> Tensor:
    """[B - 1]: exp(-(k - 1) / gamma) for draft k; an early draft decides about all behind it."""
    return torch.exp(-torch.arange(block_len - 1) / gamma)
