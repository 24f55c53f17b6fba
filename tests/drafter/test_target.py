"""A drafter's view of its target, read from the target's own files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import DIMENSIONS, make_checkpoint

from paceline.cluster.errors import ModelError
from paceline.drafter.target import Target

CPU = torch.device("cpu")


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_the_tables_are_the_targets_own(tmp_path: Path, is_tied: bool) -> None:
    path = make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=is_tied)
    stored = load_file(path / "model.safetensors")
    target = Target.load(path, 77, torch.float32, CPU)

    assert torch.equal(target.embedding, stored["model.embed_tokens.weight"])
    assert (target.head is None) == is_tied
    assert target.head is None or torch.equal(target.head, stored["lm_head.weight"])
    assert (target.architecture, target.max_model_len) == ("Qwen3ForCausalLM", 77)
    assert target.hidden_size == DIMENSIONS["hidden_size"]
    assert target.num_layers == DIMENSIONS["num_hidden_layers"]
    assert target.vocab_size == DIMENSIONS["vocab_size"]


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama")
    stored = load_file(path / "model.safetensors")
    del stored["lm_head.weight"]
    save_file(stored, path / "model.safetensors")

    with pytest.raises(ModelError, match="lm_head"):
        Target.load(path, 77, torch.float32, CPU)
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        Target.load(tmp_path / "elsewhere", 77, torch.float32, CPU)
