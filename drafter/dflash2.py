"""What DFlash 2 adds: convolutions along a block, and a walk over candidates that depend on each other.

Formulas: the DFlash 2 report. Shapes: N rows in blocks of B, H hidden, T kernel taps, G groups of channels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import noise
from ..kernels.backend import Backend, Linear


@dataclass(frozen=True, slots=True)
class BlockConv:
    """A causal convolution along each block, with kernels that the rows themselves adjust.

    y[i, c] = sum_t (base[t, c] + delta[i, t, group of c]) * x[i - t, c], with x = 0 before the block. Side 0
    is applied to a sublayer's input, side 1 to its output; the deltas of both are computed from the input.
    """

    base: Tensor  # [2, T, H]
    projection: Linear  # [N, H] -> [N, 2 * T * G]
    group_size: int

    def before(self, x: Tensor, block_len: int) -> tuple[Tensor, Tensor]:
        """The sublayer's input [N, H] convolved, and the deltas [N, T, G] for its output."""
        num_taps, hidden = self.base.shape[1:]
        deltas = self.projection(x).view(len(x), 2, num_taps, hidden // self.group_size)
        return self._convolve(x, deltas[:, 0], self.base[0], block_len), deltas[:, 1]

    def after(self, y: Tensor, deltas: Tensor, block_len: int) -> Tensor:
        """The sublayer's output [N, H] convolved."""
        return self._convolve(y, deltas, self.base[1], block_len)

    def _convolve(self, x: Tensor, deltas: Tensor, base: Tensor, block_len: int) -> Tensor:
        num_taps, hidden = base.shape
        blocks = x.view(-1, block_len, hidden // self.group_size, self.group_size)
        kernels = base.view(num_taps, -1, self.group_size) + deltas.unsqueeze(-1)  # [N, T, G, H / G]
        kernels = kernels.view(-1, block_len, *kernels.shape[1:])
        out = blocks * kernels[:, :, 0]
        for tap in range(1, min(num_taps, block_len)):
            out[:, tap:] += blocks[:, :-tap] * kernels[:, tap:, tap]
        return out.view_as(x)


@dataclass(frozen=True, slots=True)
class Selector:
    """Chooses a block's drafts from left to right among each slot's best tokens.

    score(c after p) = logit(c) + <predecessor[p] * (W h), successor[c]>.
    """

    predecessor: Tensor  # [vocab, rank]
    successor: Tensor  # [vocab, rank]
    projection: Linear  # [N, H] -> [N, rank]
    num_candidates: int

    def choose(
        self,
        hidden: Tensor,
        logits: Tensor,
        anchors: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Draft ids and their probabilities among the candidates, both [n, k].

        hidden [n * k, H] and logits [n * k, vocab] float32 are of the drafted slots; anchors, temperature and
        seeds [n]; positions [n, k] of the drafted tokens.
        """
        num_blocks, num_drafts = positions.shape
        unary, candidates = logits.topk(self.num_candidates, dim=-1)
        unary, candidates = (
            unary.view(num_blocks, num_drafts, -1),
            candidates.view(num_blocks, num_drafts, -1),
        )
        keys = self.projection(hidden).view(num_blocks, num_drafts, -1)
        is_drawn = (temperature > 0).unsqueeze(1)
        divisor = torch.where(is_drawn, temperature.unsqueeze(1), 1.0)
        before = anchors
        token_ids, confidences = [], []
        for slot in range(num_drafts):
            query = self.predecessor[before] * keys[:, slot]  # [n, rank]
            pairwise = (self.successor[candidates[:, slot]] @ query.unsqueeze(-1)).squeeze(-1)
            scores = (unary[:, slot] + pairwise.float()) / divisor
            keyed = scores + noise.gumbel(seeds, positions[:, slot], candidates[:, slot]) * is_drawn
            choice = keyed.argmax(dim=1, keepdim=True)
            before = candidates[:, slot].gather(1, choice).squeeze(1)
            token_ids.append(before)
            confidences.append(scores.softmax(dim=1).gather(1, choice).squeeze(1))
        return torch.stack(token_ids, dim=1), torch.stack(confidences, dim=1)


def load_conv(weights: dict[str, Tensor], prefix: str, group_size: int, backend: Backend) -> BlockConv:
    """Take one convolution's tensors out of `weights`."""
    projection = backend.linear(weights.pop(f"{prefix}.kernel_projection.weight"), None)
    return BlockConv(weights.pop(f"{prefix}.base_kernel"), projection, group_size)


def load_selector(weights: dict[str, Tensor], num_candidates: int, backend: Backend) -> Selector:
    """Take the selector's tensors out of `weights`."""
    return Selector(
        weights.pop("candidate_selector.predecessor_codebook"),
        weights.pop("candidate_selector.successor_codebook"),
        backend.linear(weights.pop("candidate_selector.hidden_projection.weight"), None),
        num_candidates,
    )
