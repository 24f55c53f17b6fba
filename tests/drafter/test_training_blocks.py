"""What a training batch asks and sees: rules that other trainers broke while their losses looked fine."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_drafter import HIDDEN_SIZE, MASK_TOKEN_ID, TAP_LAYER_IDS, config_of, make_drafter, make_target
from torch import Tensor

from paceline.cluster.messages import Commit, Open, Propose, SamplingParams
from paceline.drafter.dflash_proposer import DFlashProposer
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.target import Target
from paceline.drafter.training.batches import make_batch, plan_pass
from paceline.drafter.training.blocks import IGNORED, Blocks, draw_anchors, slot_weights
from paceline.drafter.training.head import TrainingHead
from paceline.drafter.training.network import DrafterNetwork
from paceline.drafter.training.shards import Example
from paceline.drafter.weights import load_weights

BLOCK_LEN = 4
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = config_of(block_size=BLOCK_LEN)
    return make_drafter(tmp_path_factory.mktemp("drafter") / "d", config)


@pytest.fixture(scope="module")
def network(drafter: Path, target: Target) -> DrafterNetwork:
    spec = DrafterSpec.load(drafter, target)
    network = DrafterNetwork(spec, 64)
    network.tap_scale.copy_(torch.rand(len(network.tap_scale)) + 0.5)
    network.take(load_weights(drafter, spec, target, torch.float32, CPU))
    return network.eval()


def sequence(length: int, prompt_len: int, seed: int = 0) -> Example:
    """Random tokens and tap rows; the last row, which may never be read, is poisoned."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(length, len(TAP_LAYER_IDS), HIDDEN_SIZE, generator=generator)
    taps[-1] = float("nan")
    token_ids = torch.randint(0, MASK_TOKEN_ID, (length,), generator=generator)
    return Example(token_ids, prompt_len, 0.0, taps)


def blocks_of(example: Example, anchors: list[int], block_len: int = BLOCK_LEN) -> Blocks:
    lens = torch.tensor([len(example.token_ids)])
    return Blocks.of(example.token_ids[None], lens, torch.tensor([anchors]), block_len)


def states_of(network: DrafterNetwork, target: Target, example: Example, anchors: list[int]) -> Tensor:
    """[A, B - 1, H]."""
    with torch.no_grad():
        taps = example.taps[None, : max(anchors)]
        return network(taps, blocks_of(example, anchors), target.embedding)[0]


def distance(
    network: DrafterNetwork, target: Target, example: Example, anchors: list[int], served: Tensor
) -> float:
    """Largest difference of training's logits from serving's [A, B - 1, vocab], by the largest logit."""
    assert target.head is not None
    trained = network.logits(states_of(network, target, example, anchors), target.head)
    return float((trained - served).abs().max() / served.abs().max())


def served_logits(drafter: Path, target: Target, example: Example, anchor: int) -> Tensor:
    """[B - 1, vocab] that serving computes behind the same tokens and tap rows."""
    proposer = DFlashProposer.load(
        drafter, target, context_bytes=1 << 20, page_size=16, dtype=torch.float32, device=CPU
    )
    tokens = example.token_ids[: anchor + 1].tolist()
    proposer.open(Open(1, tokens[:-1], anchor, GREEDY))
    proposer.commit([Commit(1, 1, 0, anchor, 0, list(range(-(-anchor // 16))))], example.taps)
    proposal = Propose(1, tokens[-1:], [20, 21])
    rows = proposer.contexts.block_rows([proposal], BLOCK_LEN, CPU)
    states = proposer.network.forward(torch.tensor(tokens[-1:]), rows)
    return proposer.network.logits(states.flatten(0, 1))


def test_the_training_forward_is_the_serving_forward(
    network: DrafterNetwork, drafter: Path, target: Target
) -> None:
    """Context, positions, masks, head and folding at once: the same logits from the same checkpoint."""
    example = sequence(40, 12)
    anchors = [12, 37, 20, 21]
    assert target.head is not None

    served = torch.stack([served_logits(drafter, target, example, anchor) for anchor in anchors])

    assert distance(network, target, example, anchors, served) < 1e-5


@pytest.mark.parametrize("bug", ["positions", "context", "order of taps", "mask token"])
def test_what_serving_does_not_do_would_be_seen(
    network: DrafterNetwork, drafter: Path, target: Target, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, anchors = sequence(40, 12), [20, 30]
    served = torch.stack([served_logits(drafter, target, example, anchor) for anchor in anchors])
    positions, mask, token_ids = Blocks.positions, Blocks.mask, Blocks.token_ids
    match bug:
        case "positions":
            monkeypatch.setattr(Blocks, "positions", property(lambda self: positions.fget(self) + 1))  # pyright: ignore[reportOptionalCall]
        case "context":
            later = lambda self: dataclasses.replace(self, anchors=self.anchors - 1)  # noqa: E731
            monkeypatch.setattr(Blocks, "mask", lambda self, num: mask(later(self), num))
        case "order of taps":
            example = dataclasses.replace(example, taps=example.taps.flip(1))
        case "mask token":
            monkeypatch.setattr(Blocks, "token_ids", lambda self, _: token_ids(self, MASK_TOKEN_ID - 1))

    assert distance(network, target, example, anchors, served) > 1e-2


def test_folding_undoes_taking(network: DrafterNetwork, drafter: Path, target: Target) -> None:
    published = load_weights(drafter, network.spec, target, torch.float32, CPU)

    folded = network.folded()

    assert folded.keys() == published.keys()
    assert all(torch.allclose(folded[name], published[name], atol=1e-6) for name in published)


def test_a_block_sees_no_other_block(network: DrafterNetwork, target: Target) -> None:
    example = sequence(40, 12)

    together = states_of(network, target, example, [15, 17, 30])
    alone = [states_of(network, target, example, [anchor])[0] for anchor in (15, 17, 30)]

    assert torch.allclose(together, torch.stack(alone), atol=1e-5)


def test_a_leak_between_blocks_would_be_seen(
    network: DrafterNetwork, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Blocks.mask

    def leaking(self: Blocks, num_context: int) -> Tensor:
        mask = sound(self, num_context).clone()
        mask[..., num_context:] = True
        return mask

    example = sequence(40, 12)
    alone = states_of(network, target, example, [15])[0]
    monkeypatch.setattr(Blocks, "mask", leaking)

    assert not torch.allclose(states_of(network, target, example, [15, 30])[0], alone, atol=1e-2)


def test_nothing_at_or_behind_the_anchor_is_seen(network: DrafterNetwork, target: Target) -> None:
    """Not its tap row, which does not exist when a block is drafted, nor any token behind it."""
    example = sequence(40, 12)
    before = states_of(network, target, example, [20, 30])[0]
    example.taps[20:-1] += 100.0
    example.token_ids[21:] = 3

    assert torch.equal(states_of(network, target, example, [20, 30])[0], before)
    example.taps[19] += 1.0
    assert not torch.allclose(states_of(network, target, example, [20, 30])[0], before, atol=1e-3)


def test_labels_are_the_tokens_at_the_rows_own_positions() -> None:
    example = dataclasses.replace(sequence(10, 3), token_ids=torch.arange(100, 110))

    blocks = blocks_of(example, [3, 8])

    assert blocks.anchor_ids.tolist() == [[103, 108]]
    assert blocks.labels.tolist() == [[[104, 105, 106], [109, IGNORED, IGNORED]]]
    assert blocks.positions.tolist() == [[3, 4, 5, 6, 8, 9, 10, 11]]
    assert blocks.token_ids(7).tolist() == [[103, 7, 7, 7, 108, 7, 7, 7]]


def test_anchors_are_answer_tokens_with_a_token_behind() -> None:
    generator = torch.Generator().manual_seed(0)
    prompt_lens, lens = torch.tensor([5, 9]), torch.tensor([30, 11])

    anchors = draw_anchors(prompt_lens, lens, 24, generator)

    assert sorted(anchors[0].tolist()) == list(range(5, 29))
    assert set(anchors[1].tolist()) == {9}


def test_early_slots_weigh_more() -> None:
    assert torch.allclose(slot_weights(4, 2.0), torch.tensor([1.0, 0.60653, 0.36788]), atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_the_targets_tied_or_not(is_tied: bool) -> None:
    target = make_target(is_tied=is_tied)
    wanted = target.embedding if target.head is None else target.head
    counts = torch.zeros(target.vocab_size, dtype=torch.int64)
    counts[[400, 3, 77]] = torch.tensor([9, 8, 7])

    whole = TrainingHead.of(target, counts, 0, torch.float32)
    some = TrainingHead.of(target, counts, 3, torch.float32)

    assert torch.equal(whole.weight, wanted)
    assert torch.equal(some.weight, wanted[[3, 77, 400]])
    assert some.classes(torch.tensor([400, 3, 5, IGNORED])).tolist() == [2, 0, IGNORED, IGNORED]
    assert whole.classes(torch.tensor([400, IGNORED])).tolist() == [400, IGNORED]


def test_a_sample_of_the_head_stands_for_the_whole(network: DrafterNetwork) -> None:
    """Over all samples, the sum under the softmax is the whole head's, and the label's score is exact."""
    target = make_target(is_tied=False)
    counts = torch.arange(target.vocab_size)
    whole = TrainingHead.of(target, counts, 0, torch.float32)
    head = TrainingHead.of(target, counts, 100, torch.float32, 40)
    tail_len = target.vocab_size - 100
    generator = torch.Generator().manual_seed(0)
    states = 0.3 * torch.randn(6, HIDDEN_SIZE, generator=generator)
    labels = torch.tensor([511, 412, 411, 3, 4, 250])  # two that are always there, four of the tail

    logits = network.logits(states, whole.weight)
    found = [head.scores(network, states, head.classes(labels), first=first) for first in range(tail_len)]

    sums = torch.stack([scores.logits.exp().sum(1) for scores in found])
    assert torch.allclose(sums.mean(0), logits.exp().sum(1), rtol=1e-5)
    assert sums.std() > 0
    assert 0 <= head.draw(7) < tail_len
    assert len({head.draw(seed) for seed in range(20)}) > 10
    for scores in found:
        assert torch.allclose(
            scores.logits.gather(1, scores.classes[:, None]), logits.gather(1, labels[:, None]), atol=1e-5
        )


def test_a_batch_pads_context_with_rows_that_nobody_sees(network: DrafterNetwork, target: Target) -> None:
    examples = [sequence(40, 12, 1), sequence(18, 6, 2)]

    batch = make_batch(examples, 6, BLOCK_LEN, seed=3)

    assert batch.num_tokens == 28 + 12
    assert bool(batch.taps.isfinite().all())
    with torch.no_grad():
        states = network(batch.taps, batch.blocks, target.embedding)
    for row, example in enumerate(examples):
        alone = states_of(network, target, example, batch.blocks.anchors[row].tolist())
        assert torch.allclose(states[row], alone, atol=1e-5)


def test_a_pass_sees_every_sequence_once_in_an_order_of_its_own() -> None:
    lens = [10 + index % 7 for index in range(100)]

    first, second = plan_pass(lens, 4, 0, 0), plan_pass(lens, 4, 0, 1)

    assert sorted(index for batch in first for index in batch) == list(range(100))
    assert first == plan_pass(lens, 4, 0, 0)
    assert first != second
    spread = [max(lens[i] for i in batch) - min(lens[i] for i in batch) for batch in first]
    assert sum(spread) / len(spread) < 1
