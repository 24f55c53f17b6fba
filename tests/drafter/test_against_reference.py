"""The drafter against the published reference model: same context K/V, same draft logits, same drafts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlash2DraftModel
from tiny_drafter import (
    HIDDEN_SIZE,
    MASK_TOKEN_ID,
    TAP_LAYER_IDS,
    config_of,
    load_reference,
    make_drafter,
    make_target,
)
from torch import Tensor
from transformers import DynamicCache

from paceline.cluster.messages import Commit, Open, Propose, SamplingParams, Slide
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.target import Target

PAGE_SIZE = 8
FULL, SLIDING = "full_attention", "sliding_attention"
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)
TOLERANCE = 1e-4


@dataclass
class Follower:
    """The reference model beside one sequence, holding what it holds in the order it got it."""

    model: Any
    target: Target
    cache: Any = field(default_factory=DynamicCache)
    pending: list[Tensor] = field(default_factory=list)  # tap rows not yet shown
    start: int = 0
    end: int = 0

    def commit(self, taps: Tensor) -> None:
        self.pending.append(taps.flatten(1))
        self.end += len(taps)

    def restart(self, position: int) -> None:
        self.cache, self.pending = DynamicCache(), []
        self.start = self.end = position

    def slide(self, start: int) -> None:
        self.states(0, 2)  # shows it the pending rows
        for layer in self.cache.layers:
            layer.keys = layer.keys[:, :, start - self.start :]
            layer.values = layer.values[:, :, start - self.start :]
        self.start = start

    def states(self, anchor: int, block_len: int) -> Tensor:
        """Normed states of the drafted slots [k, H]."""
        ids = torch.full((1, block_len), MASK_TOKEN_ID)
        ids[0, 0] = anchor
        scale = float(self.model.config.dflash_config.get("input_embedding_scale", 1.0))
        taps = (
            torch.cat(self.pending)[None]
            if self.pending
            else torch.zeros(1, 0, len(TAP_LAYER_IDS) * HIDDEN_SIZE)
        )
        states = self.model(
            target_hidden=taps,
            noise_embedding=self.target.embedding[ids] * scale,
            position_ids=torch.arange(self.end - taps.shape[1], self.end + block_len)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.pending = []
        self.cache.crop(-block_len)
        return states[0, 1:]

    def logits(self, states: Tensor) -> Tensor:
        head = self.target.embedding if self.target.head is None else self.target.head
        return self.model.compute_logits(states, lambda hidden: hidden @ head.T)

    def chosen(self, states: Tensor, logits: Tensor, anchor: int) -> list[int]:
        """The reference's greedy drafts."""
        if not isinstance(self.model, DFlash2DraftModel):
            return logits.argmax(-1).tolist()
        selector = self.model.candidate_selector
        return selector.select(states[None], logits[None], torch.tensor([anchor]), 0.0)[0][0].tolist()


class Bench:
    """A proposer, pages handed out as a scheduler would, and a follower beside every sequence."""

    def __init__(self, path: Path, target: Target, num_sequences: int, block_size: int | None = None) -> None:
        self.proposer = DFlashProposer.load(
            path,
            target,
            context_bytes=4 << 20,
            page_size=PAGE_SIZE,
            block_size=block_size,
            dtype=torch.float32,
        )
        reference = load_reference(path)
        self.followers = [Follower(reference, target) for _ in range(num_sequences)]
        self.random = torch.Generator().manual_seed(0)
        self.free = list(range(self.proposer.num_pages))
        self.new_tokens: list[list[int]] = []

    def open(self, prompt_lens: list[int]) -> None:
        for sequence_id, length in enumerate(prompt_lens):
            self.proposer.open(Open(sequence_id, self.tokens(length), length, GREEDY))
            self.commit([(sequence_id, length)])
            self.new_tokens.append(self.tokens(1))

    def tokens(self, num: int) -> list[int]:
        return torch.randint(0, MASK_TOKEN_ID, (num,), generator=self.random).tolist()

    def commit(self, lengths: list[tuple[int, int]], gap: int = 0) -> None:
        """Commit random tap rows, all in one batch; with a gap, the window restarts that much further on."""
        taps = torch.randn(sum(num for _, num in lengths), 3, HIDDEN_SIZE, generator=self.random)
        commits, row = [], 0
        for sequence_id, num in lengths:
            window = self.proposer.contexts.window(sequence_id)
            follower = self.followers[sequence_id]
            if gap:
                self.free += window.pages
                follower.restart(window.end + gap)
                start = position = window.end + gap
                num_held = 0
            else:
                start, position, num_held = window.start, window.end, len(window.pages)
            num_new = -(-(position + num) // PAGE_SIZE) - start // PAGE_SIZE - num_held
            pages = [self.free.pop() for _ in range(num_new)]
            commits.append(Commit(sequence_id, 1, row, num, position, pages, gap > 0))
            follower.commit(taps[row : row + num])
            row += num
        self.proposer.commit(commits, taps)
        self.proposer.check()

    def slide(self, sequence_id: int, new_start: int) -> None:
        before = self.proposer.contexts.window(sequence_id).pages
        self.proposer.slide(Slide(sequence_id, new_start))
        self.free += before[: len(before) - len(self.proposer.contexts.window(sequence_id).pages)]
        self.followers[sequence_id].slide(new_start)
        self.proposer.check()

    def draft_and_compare(self, num_drafts: int) -> None:
        network = self.proposer.network
        proposals = [
            Propose(sequence_id, new_tokens, self.free[4 * sequence_id : 4 * sequence_id + 4])
            for sequence_id, new_tokens in enumerate(self.new_tokens)
        ]
        anchors = [tokens[-1] for tokens in self.new_tokens]
        drafts = self.proposer.propose(proposals, num_drafts)
        rows = self.proposer.contexts.block_rows(proposals, num_drafts + 1, network.device)
        states = network.forward(torch.tensor(anchors), rows)
        for sequence_id, follower in enumerate(self.followers):
            reference = follower.states(anchors[sequence_id], num_drafts + 1)
            logits = follower.logits(reference)
            draft = drafts[sequence_id]
            assert (network.logits(states[sequence_id]) - logits).abs().max() < TOLERANCE
            assert draft.token_ids == follower.chosen(reference, logits, anchors[sequence_id])
            assert all(0 < confidence <= 1.0001 for confidence in draft.confidences)
            assert len(draft.confidences) == num_drafts

    def accept_random(self, num_drafts: int) -> None:
        """Accept some drafts of every sequence: as many and one more new tokens, as many rows committed."""
        lengths = torch.randint(1, num_drafts + 2, (len(self.followers),), generator=self.random).tolist()
        self.commit(list(enumerate(lengths)))
        self.new_tokens = [self.tokens(length) for length in lengths]

    def compare_context(self) -> None:
        for sequence_id, follower in enumerate(self.followers):
            follower.states(0, 2)  # shows it the pending rows
            for layer in range(self.proposer.network.spec.num_layers):
                k, v = self.context_kv(sequence_id, layer)
                assert (k - follower.cache.layers[layer].keys[0].transpose(0, 1)).abs().max() < TOLERANCE
                assert (v - follower.cache.layers[layer].values[0].transpose(0, 1)).abs().max() < TOLERANCE

    def context_kv(self, sequence_id: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [len, kv heads, D] of the window."""
        window, network = self.proposer.contexts.window(sequence_id), self.proposer.network
        first = window.start % PAGE_SIZE
        rows = slice(first, first + window.end - window.start)
        k, v = network.k_pages(layer)[window.pages], network.v_pages(layer)[window.pages]
        return k.flatten(0, 1)[rows], v.flatten(0, 1)[rows]


LAYERS = {
    "full": {"layer_types": (FULL, FULL)},
    "sliding": {"layer_types": (SLIDING, SLIDING)},
    "mixed": {"layer_types": (SLIDING, FULL, SLIDING)},
    "sliding-not-causal": {"layer_types": (SLIDING, FULL), "is_causal": False},
    "full-causal": {"layer_types": (FULL, FULL), "is_causal": True},
    "generation-2": {"layer_types": (SLIDING, SLIDING), "generation": 2, "is_causal": False},
    "generation-2-mixed": {"layer_types": (SLIDING, FULL), "generation": 2},
    "scaled": {
        "options": {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 5.0},
    },
    "biased": {"attention_bias": True},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "rope-llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "rope-yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    },
}


@pytest.mark.parametrize(
    ("layers", "is_tied"), [*((name, False) for name in LAYERS), ("full", True), ("generation-2", True)]
)
def test_fifty_steps_of_random_acceptance_equal_the_reference(
    tmp_path: Path, layers: str, is_tied: bool
) -> None:
    path = make_drafter(tmp_path, config_of(**LAYERS[layers]))
    bench = Bench(path, make_target(is_tied=is_tied), num_sequences=3)
    bench.open([5, 23, 60])

    for _ in range(50):
        bench.draft_and_compare(7)
        bench.accept_random(3)
    bench.draft_and_compare(7)
    bench.compare_context()


@pytest.mark.parametrize(("trained", "block_size"), [(4, None), (16, None), (16, 5), (8, 2)])
@pytest.mark.parametrize("generation", [1, 2])
def test_block_sizes_up_to_the_trained_one(
    tmp_path: Path, trained: int, block_size: int | None, generation: int
) -> None:
    config = config_of(block_size=trained, generation=generation, layer_types=(SLIDING, FULL))
    bench = Bench(make_drafter(tmp_path, config), make_target(), 2, block_size)
    bench.open([17, 3])
    num_drafts = (block_size or trained) - 1

    assert bench.proposer.max_drafts == num_drafts
    for num in {1, num_drafts // 2 or 1, num_drafts}:
        bench.draft_and_compare(num)
        bench.accept_random(num)
    bench.compare_context()


@pytest.mark.parametrize("context_len", [15, 16, 17, 23, 24, 25, 31, 49, 70])
@pytest.mark.parametrize("is_causal", [None, True, False])
def test_edges_of_a_window_of_24(tmp_path: Path, context_len: int, is_causal: bool | None) -> None:
    """Contexts of W - block, W - 1, W, W + 1 and beyond 2 W."""
    config = config_of(layer_types=(SLIDING, FULL), is_causal=is_causal)
    bench = Bench(make_drafter(tmp_path, config), make_target(), 2)
    bench.open([context_len, context_len + 7])

    bench.draft_and_compare(7)


def test_a_window_shorter_than_the_block(tmp_path: Path) -> None:
    config = config_of(layer_types=(SLIDING, SLIDING), sliding_window=4, is_causal=False)
    bench = Bench(make_drafter(tmp_path, config), make_target(), 2)
    bench.open([1, 30])

    bench.draft_and_compare(7)


def test_a_slide_cuts_the_context_and_moves_nothing(tmp_path: Path) -> None:
    bench = Bench(make_drafter(tmp_path, config_of()), make_target(), 2)
    bench.open([50, 41])

    bench.slide(0, 2 * PAGE_SIZE)
    bench.draft_and_compare(7)
    bench.accept_random(7)
    bench.slide(0, 6 * PAGE_SIZE)
    bench.slide(1, 3 * PAGE_SIZE)
    bench.draft_and_compare(7)
    bench.compare_context()


def test_sliding_layers_do_not_miss_what_a_slide_at_their_window_drops(tmp_path: Path) -> None:
    path = make_drafter(tmp_path, config_of(layer_types=(SLIDING, SLIDING)))
    bench = Bench(path, make_target(), 1)
    bench.open([100])
    network, proposer = bench.proposer.network, bench.proposer
    before = proposer.propose([Propose(0, bench.new_tokens[0], bench.free[:4])], 7)

    assert proposer.max_context_len == 23
    proposer.slide(Slide(0, (100 - 23) // PAGE_SIZE * PAGE_SIZE))
    rows = proposer.contexts.block_rows([Propose(0, bench.new_tokens[0], bench.free[:4])], 8, network.device)
    states = network.forward(torch.tensor(bench.new_tokens[0]), rows)

    assert network.logits(states[0]).argmax(-1).tolist() == before[0].token_ids


@pytest.mark.parametrize("gap", [1, 5, 8, 40])
def test_a_restart_leaves_a_shorter_window(tmp_path: Path, gap: int) -> None:
    """The window may then begin inside a page; what is before it there is never seen."""
    bench = Bench(make_drafter(tmp_path, config_of(layer_types=(SLIDING, FULL))), make_target(), 2)
    bench.open([20, 21])

    for sequence_id in (0, 1):  # rows were lost: the tokens are known, their context is not
        bench.proposer.propose([Propose(sequence_id, bench.new_tokens[sequence_id], bench.free[:4])], 1)
        bench.new_tokens[sequence_id] = bench.tokens(gap)
        bench.commit([(sequence_id, 6)], gap=gap)
        bench.new_tokens[sequence_id] += bench.tokens(6)
    bench.draft_and_compare(7)
    bench.accept_random(7)
    bench.draft_and_compare(7)
    bench.compare_context()


def test_an_empty_context_still_drafts(tmp_path: Path) -> None:
    bench = Bench(make_drafter(tmp_path, config_of()), make_target(), 1)
    bench.proposer.open(Open(0, bench.tokens(13), 13, GREEDY, 13, 13, []))
    bench.followers[0].restart(13)
    bench.new_tokens = [bench.tokens(1)]

    bench.draft_and_compare(7)
    bench.accept_random(4)
    bench.draft_and_compare(7)
