"""Recorded sequences in the order of training: a pure function of seed, pass and place in the pass.

So training that was killed goes on with the batch it would have seen next, and no state of a random generator
has to be kept.
"""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...cluster.errors import ConfigError
from .blocks import Blocks, draw_anchors
from .shards import Example, Shard

_BUCKET_BATCHES = 32  # sequences of so many batches are sorted by length, so that batches pad little


@dataclass(frozen=True, slots=True)
class Batch:
    """n sequences and the blocks that are trained on."""

    taps: Tensor  # [n, S, taps, H] as stored, zero-padded; S reaches the last anchor
    blocks: Blocks
    num_tokens: int  # of the answers
    teachers: Tensor | None = None  # [n, A, B - 1, H]: behind the last block, one row before each label's

    def to(self, device: torch.device) -> "Batch":
        teachers = None if self.teachers is None else self.teachers.to(device)
        return Batch(self.taps.to(device), self.blocks.to(device), self.num_tokens, teachers)


class Examples:
    """Every sequence of some shards that has something to draft, the first of each prompt."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        first: dict[bytes, tuple[Shard, int]] = {}
        for shard in shards:
            for index, (prompt, answer_len) in enumerate(
                zip(shard.prompts(), shard.answer_lens, strict=True)
            ):
                if answer_len >= 2:
                    first.setdefault(prompt.numpy().tobytes(), (shard, index))
        self._where = list(first.values())
        if not self._where:
            raise ConfigError("no answer of these data has two tokens; make data with longer answers")

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> Example:
        shard, place = self._where[index]
        return shard[place]

    @property
    def lens(self) -> list[int]:
        return [shard.lens[place] for shard, place in self._where]

    @property
    def num_answer_tokens(self) -> int:
        return sum(shard.answer_lens[place] for shard, place in self._where)

    def token_counts(self, vocab_size: int) -> Tensor:
        """int64 [vocab]: how often each token occurs in the answers."""
        answers = [shard.answer(place).long() for shard, place in self._where]
        return torch.bincount(torch.cat(answers), minlength=vocab_size)


def plan_pass(lens: Sequence[int], batch_size: int, seed: int, number: int) -> list[list[int]]:
    """The batches of a pass, each sequence in at most one; what does not fill a batch waits for the next."""
    generator = np.random.default_rng((seed, number))
    order = generator.permutation(len(lens))
    bucket_len = batch_size * _BUCKET_BATCHES
    buckets = [order[first : first + bucket_len] for first in range(0, len(order), bucket_len)]
    ordered = [sorted(bucket.tolist(), key=lambda index: lens[index]) for bucket in buckets]
    batches = [
        bucket[first : first + batch_size]
        for bucket in ordered
        for first in range(0, len(bucket) - batch_size + 1, batch_size)
    ] or [order.tolist()]  # fewer sequences than a batch
    return [batches[index] for index in generator.permutation(len(batches))]


def make_batch(
    examples: Sequence[Example], num_anchors: int, block_len: int, seed: int, *, with_teachers: bool = False
) -> Batch:
    """Draw anchors and lay the sequences side by side."""
    lens = torch.tensor([len(example.token_ids) for example in examples])
    prompt_lens = torch.tensor([example.prompt_len for example in examples])
    generator = torch.Generator().manual_seed(seed)
    anchors = draw_anchors(prompt_lens, lens, num_anchors, generator)
    num_context = int(anchors.max())
    first = examples[0].taps
    taps = torch.zeros(len(examples), num_context, *first.shape[1:], dtype=first.dtype)
    token_ids = torch.zeros(len(examples), int(lens.max()), dtype=torch.int64)
    for row, example in enumerate(examples):
        end = min(num_context, len(example.token_ids) - 1)
        taps[row, :end] = example.taps[:end]
        token_ids[row, : len(example.token_ids)] = example.token_ids
    teachers = _teachers(examples, anchors, block_len) if with_teachers else None
    blocks = Blocks.of(token_ids, lens, anchors, block_len)
    return Batch(taps, blocks, int((lens - prompt_lens).sum()), teachers)


def _teachers(examples: Sequence[Example], anchors: Tensor, block_len: int) -> Tensor:
    """[n, A, B - 1, H]: the states that decided the tokens behind each anchor; any behind the end."""
    places = anchors.unsqueeze(-1) + torch.arange(block_len - 1)
    rows: list[Tensor] = []
    for example, some in zip(examples, places, strict=True):
        assert example.last is not None, "the corpus has been asked"
        rows.append(example.last[some.clamp(max=len(example.token_ids) - 1)])
    return torch.stack(rows)


def training_batches(
    examples: Examples,
    *,
    batch_size: int,
    num_anchors: int,
    block_len: int,
    seed: int,
    first_step: int,
    rank: int,
    num_ranks: int,
    with_teachers: bool = False,
) -> Generator[Batch, None, None]:
    """This rank's batches from a step on, without end; the next is made while one is used.

    A step takes `num_ranks` batches of the pass's plan, one for each rank.
    """
    lens = examples.lens
    num_steps = steps_per_pass(lens, batch_size, num_ranks)

    def indices_of() -> Iterator[tuple[int, list[int]]]:
        step = first_step
        while True:
            number, place = divmod(step, num_steps)
            plan = plan_pass(lens, batch_size, seed, number)
            for at in range(place, num_steps):
                yield step, plan[(at * num_ranks + rank) % len(plan)]
                step += 1

    def make(step: int, indices: list[int]) -> Batch:
        batch_seed = (seed * 1_000_003 + step) * num_ranks + rank
        chosen = [examples[index] for index in indices]
        return make_batch(chosen, num_anchors, block_len, batch_seed, with_teachers=with_teachers)

    with ThreadPoolExecutor(1) as pool:
        upcoming = indices_of()
        following = pool.submit(make, *next(upcoming))
        while True:
            batch = following.result()
            following = pool.submit(make, *next(upcoming))
            yield batch


def steps_per_pass(lens: Sequence[int], batch_size: int, num_ranks: int) -> int:
    """How many steps see all but a few of the sequences once."""
    return max(1, len(plan_pass(lens, batch_size, 0, 0)) // num_ranks)
