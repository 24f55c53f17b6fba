"""What `--drafter default` means: the shipped drafter for the default model, prompt lookup for any other."""

from pathlib import Path

import pytest
from tiny import make_checkpoint
from tiny_drafter import config_of, make_drafter

from paceline.cluster.config import Config, ModelConfig
from paceline.deploy import drafter_source
from paceline.deploy.drafter_source import choose_drafter


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "target", "llama")


def test_the_default_model_drafts_with_the_shipped_one(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(options={"target_layer_ids": [0, 2]}, num_target_layers=3)
    shipped = make_drafter(tmp_path / "shipped", config)
    monkeypatch.setattr(drafter_source, "SHIPPED", shipped)

    choice = choose_drafter(Config(), target)

    assert choice is not None
    assert (choice.name, choice.path, choice.tap_layer_ids) == ("default", shipped, (0, 2))
    other = choose_drafter(Config(model=ModelConfig(model=str(target))), target)
    assert other is not None
    assert other.path is None


def test_an_installation_without_it_looks_prompts_up(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_source, "SHIPPED", tmp_path / "absent")

    choice = choose_drafter(Config(), target)

    assert choice is not None
    assert (choice.name, choice.path) == ("ngram", None)
