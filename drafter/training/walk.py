"""What drafting would have accepted on recorded greedy text, without an engine.

A greedy verify accepts the drafts that equal the text, so the text itself says what each step would have
emitted: from an anchor with m matching drafts to the anchor m + 1 further on. Every anchor of an answer is
drafted from in one forward. This is for the curves of training; what counts is the engine's own figure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocks import Blocks
from .network import DrafterNetwork
from .shards import Example

_ANCHORS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Walk:
    """Acceptance over some sequences."""

    mean_tokens_per_verify: float
    per_slot: list[float]  # share of verifies in which the drafts up to this slot stood
    num_verifies: int


@torch.no_grad()
def walk(network: DrafterNetwork, examples: Sequence[Example], embedding: Tensor, head: Tensor) -> Walk:
    """Speculate along every example; `head` [vocab, H] is the whole one, as in serving."""
    num_drafts = network.spec.block_size - 1
    num_verifies, num_emitted = 0, 0
    stood = [0] * num_drafts
    for example in examples:
        matches = count_matches(network, example, embedding, head)
        place = 0
        while place < len(matches):
            num_matching = matches[place]
            for slot in range(num_matching):
                stood[slot] += 1
            num_verifies += 1
            emitted = min(num_matching + 1, len(matches) - place)
            num_emitted += emitted
            place += emitted
    return Walk(
        num_emitted / max(1, num_verifies), [count / max(1, num_verifies) for count in stood], num_verifies
    )


def count_matches(network: DrafterNetwork, example: Example, embedding: Tensor, head: Tensor) -> list[int]:
    """For every anchor of the answer but the last token, how many leading drafts equal the text."""
    device, block_len = embedding.device, network.spec.block_size
    token_ids = example.token_ids.to(device)[None]
    lens = torch.tensor([len(example.token_ids)], device=device)
    taps = example.taps[:-1].to(device)[None]
    matches: list[int] = []
    places = torch.arange(example.prompt_len, len(example.token_ids) - 1, device=device)
    for anchors in places.split(_ANCHORS_AT_ONCE):
        blocks = Blocks.of(token_ids, lens, anchors[None], block_len)
        states = network(taps[:, : int(anchors[-1])], blocks, embedding)[0]  # [A, B - 1, H]
        labels = blocks.labels[0]
        counts = torch.zeros(len(anchors), dtype=torch.int64, device=device)
        alive = torch.arange(len(anchors), device=device)
        for slot in range(block_len - 1):  # a slot is looked at only where all before it stood
            drafts = network.logits(states[alive, slot], head).argmax(-1)
            alive = alive[drafts == labels[alive, slot]]
            counts[alive] += 1
            if len(alive) == 0:
                break
        matches += counts.tolist()
    return matches
