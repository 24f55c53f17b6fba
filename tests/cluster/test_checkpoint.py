"""Opening a directory of weights: which files, under which names, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.cluster.checkpoint import Checkpoint
from paceline.cluster.errors import ModelError

GRID = torch.arange(48.0).reshape(8, 6)
TENSORS = {"grid": GRID, "row": torch.arange(5.0), "ids": torch.arange(4)}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_slices_are_cast_as_they_are_copied(path: Path) -> None:
    block, piece = torch.empty(2, 3, dtype=torch.bfloat16), torch.empty(2)
    with Checkpoint(path) as checkpoint:
        checkpoint.read("grid", block, first_row=4, first_column=1)
        checkpoint.read("row", piece, first_row=3)

    assert torch.equal(block, GRID[4:6, 1:4].bfloat16())
    assert piece.tolist() == [3.0, 4.0]


def test_a_whole_tensor_outlives_the_files(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        grid = checkpoint.tensor("grid")

    assert torch.equal(grid, GRID)


def test_tensors_are_known_by_their_new_names(path: Path) -> None:
    with Checkpoint(path, lambda name: f"layers.0.{name}") as checkpoint:
        assert checkpoint.names == {f"layers.0.{name}" for name in TENSORS}
        assert torch.equal(checkpoint.tensor("layers.0.grid"), GRID)


def test_only_the_index_says_which_files_count(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    save_file({"other": GRID}, path / "adapter.safetensors")
    index = {"weight_map": dict.fromkeys(TENSORS, "model-00001-of-00001.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint(path) as checkpoint:
        assert checkpoint.names == set(TENSORS)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"grid": 3}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_refused(path: Path, text: str) -> None:
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"index\.json is not an index of weights"):
        Checkpoint(path)


def test_what_fits_is_accepted(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        checkpoint.check(SHAPES, integers=("ids",))
        checkpoint.check({"grid": (8, 6)}, optional={"row": (5,), "column": (2,)}, ignored=("ids",))
        checkpoint.check_some({"grid": (8, 6)})


def test_each_misfit_is_named(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        with pytest.raises(ModelError, match=r"missing column; unexpected row; wrong grid is \(8, 6\), not"):
            checkpoint.check({"grid": (6, 8), "column": (2,)}, ignored=("ids",))
        with pytest.raises(ModelError, match="wrong ids is I64, not one of F32, BF16, F16"):
            checkpoint.check(SHAPES)
        with pytest.raises(ModelError, match="missing column; wrong row is"):
            checkpoint.check_some({"row": (6,), "column": (2,)})


def test_many_misfits_are_counted(path: Path) -> None:
    with (
        Checkpoint(path) as checkpoint,
        pytest.raises(ModelError, match="missing t0, t1, t2, t3, t4 and 3 more"),
    ):
        checkpoint.check_some({f"t{number}": (1,) for number in range(8)})
