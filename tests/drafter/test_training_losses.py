"""Distillation: the target's distribution is what it answered by, and the distance is the plain formula."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from trained import CPU, LAST_LAYER_ID, fill, make_target, settings_of, write_chats

from paceline.cluster.errors import ConfigError
from paceline.drafter.target import Target
from paceline.drafter.training.batches import Examples, make_batch
from paceline.drafter.training.data import find_shards
from paceline.drafter.training.fit import FitPace, FitSettings, fit
from paceline.drafter.training.head import Scores
from paceline.drafter.training.losses import FinalNorm, token_losses

SETTINGS = FitSettings(
    block_size=4,
    mask_token_id=500,
    passes=12.0,
    batch_size=4,
    num_anchors=8,
    lr=3e-3,
    warmup_steps=5,
    max_vocab=0,
    distill_share=0.5,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    root = tmp_path_factory.mktemp("data")
    chats = write_chats(root / "chats.jsonl", 16)
    settings = settings_of(prompts_file=str(chats), sampled_share=0.0, round_len=16, keeps_last=True)
    fill(root / "d", target, settings, 10**9)
    return root / "d"


def train(data: Path, target: Path, out: Path, settings: FitSettings) -> list[float]:
    """The losses that were logged."""
    losses: list[float] = []
    pace = FitPace(log_every=5, walk_len=4)
    fit([data], target, out, settings, pace, CPU, lambda record, _: losses.append(record.loss))
    return losses


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_is_the_plain_formula(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    drafter, teacher = (3 * torch.randn(5, 11, generator=generator) for _ in range(2))
    labels = torch.tensor([0, 10, 3, 3, 7])

    found = token_losses(Scores(drafter, labels), teacher, share)

    p, q = teacher.double().softmax(-1), drafter.double().softmax(-1)
    cross = -q[torch.arange(5), labels].log()
    distance = (p * (p / q).log()).sum(-1)
    assert torch.allclose(found.double(), (1 - share) * cross + share * distance, atol=1e-5)
    assert torch.allclose(token_losses(Scores(teacher, labels), teacher, 1.0), torch.zeros(5), atol=1e-6)


def test_a_column_that_a_row_lacks_costs_nothing() -> None:
    drafter = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    absent = F.pad(drafter, (0, 1), value=-torch.inf).requires_grad_()
    labels = torch.tensor([1, 2])

    losses = token_losses(Scores(absent, labels), F.pad(drafter.flip(1), (0, 1), value=-torch.inf), 0.5)
    losses.sum().backward()

    assert torch.allclose(losses, token_losses(Scores(drafter, labels), drafter.flip(1), 0.5), atol=1e-6)
    assert absent.grad is not None
    assert bool(absent.grad.isfinite().all())


def test_the_teachers_states_decide_the_labels(data: Path, target: Path) -> None:
    """Greedy answers: the head over the row before a label says the label; a row further it would not."""
    examples = Examples(find_shards(data, "train"))
    batch = make_batch([examples[index] for index in range(6)], 8, 4, seed=0, with_teachers=True)
    assert batch.teachers is not None
    assert examples[0].taps.shape[1] == LAST_LAYER_ID
    whole = Target.load(target, 512, torch.float32, CPU)
    assert whole.head is not None

    said = (FinalNorm(target, CPU)(batch.teachers) @ whole.head.T).argmax(-1)

    labels = batch.blocks.labels
    assert bool((said == labels)[labels >= 0].all())
    assert not bool((said[..., 1:] == labels[..., :-1])[labels[..., :-1] >= 0].all())


def test_distillation_trains_and_needs_what_was_kept(tmp_path: Path, data: Path, target: Path) -> None:
    for name, changes in (("whole", {}), ("sampled", {"max_vocab": 64, "sampled_vocab": 32})):
        losses = train(data, target, tmp_path / name, dataclasses.replace(SETTINGS, **changes))
        assert losses[-1] < losses[0] - 0.5
    with pytest.raises(ConfigError, match="a share; give a number from 0 to 1"):
        train(data, target, tmp_path / "x", dataclasses.replace(SETTINGS, distill_share=1.5))
    chats = write_chats(tmp_path / "chats.jsonl", 8)
    fill(tmp_path / "plain", target, settings_of(prompts_file=str(chats), round_len=8), 10**9)
    with pytest.raises(ConfigError, match="--keep-last"):
        train(tmp_path / "plain", target, tmp_path / "y", SETTINGS)
