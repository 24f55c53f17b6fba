"""Loading: what is refused and how it is said, and how little memory it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drive import make_config
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from paceline.cluster.errors import ConfigError, ModelError
from paceline.workers.layers import Partition, expected_shapes
from paceline.workers.runner import Runner
from paceline.workers.spec import ModelSpec


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "tiny", "llama")


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "model.safetensors"
    weights = load_file(file)
    for name, weight in changes.items():
        if weight is None:
            del weights[name]
        else:
            weights[name] = weight
    save_file(weights, file)


def test_missing_unexpected_and_misshapen_tensors_are_named(checkpoint: Path) -> None:
    edit_weights(
        checkpoint,
        **{
            "model.layers.1.mlp.up_proj.weight": None,
            "model.layers.9.mlp.up_proj.weight": torch.zeros(1),
            "model.norm.weight": torch.zeros(3),
            "lm_head.weight": torch.zeros(512, 64, dtype=torch.int8),
        },
    )
    with pytest.raises(ModelError) as caught:
        Runner(checkpoint, make_config())
    text = str(caught.value)
    assert "missing model.layers.1.mlp.up_proj.weight" in text
    assert "unexpected model.layers.9.mlp.up_proj.weight" in text
    assert "model.norm.weight is (3,), not (64,)" in text
    assert "lm_head.weight is I8" in text


def test_pickled_weights_are_refused(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pickled weights \(pytorch_model\.bin\).*safetensors"):
        Runner(checkpoint, make_config())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "has no \\*.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 100), "cannot be read"),
        (lambda path: (path / "config.json").unlink(), "config.json does not exist"),
        (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
        (
            lambda path: edit_config(path, architectures=["BertModel"]),
            "BertModel .* supported are LlamaForCau",
        ),
        (lambda path: edit_config(path, architectures=None), "architecture none is not supported"),
        (lambda path: edit_config(path, hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (lambda path: edit_config(path, hidden_size="big"), "hidden_size is 'big'"),
        (lambda path: edit_config(path, quantization_config={"bits": 4}), "quantised"),
        (lambda path: edit_config(path, rope_parameters={"rope_type": "su"}), "rope type 'su' is not supp"),
    ],
)
def test_damaged_checkpoints_are_refused(checkpoint: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(checkpoint)
    with pytest.raises(ModelError, match=message):
        Runner(checkpoint, make_config())


def test_index_with_a_missing_file_is_refused(checkpoint: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 of its weight files .model-00002-of-00002.safetensors"):
        Runner(checkpoint, make_config())


def test_code_of_a_checkpoint_is_not_run(checkpoint: Path) -> None:
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    (checkpoint / "modeling_evil.py").write_text("raise SystemExit(1)")
    Runner(checkpoint, make_config())


def test_settings_that_do_not_fit_name_the_remedy(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="raise kv_cache_gib or lower max_model_len"):
        Runner(checkpoint, make_config(kv_cache_gib=1e-5))
    with pytest.raises(ConfigError, match="max_model_len 1000 is above the model's 512"):
        Runner(checkpoint, make_config(max_len=1000))
    with pytest.raises(ConfigError, match=r"tap_layer_ids \[3\] are not blocks of this model; use 0 to 2"):
        Runner(checkpoint, make_config(), tap_layer_ids=(3,))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3 .* choose one of 1, 2, 4"):
        Partition(ModelSpec.load(checkpoint), 0, 3)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_partitions_cover_the_model_once(checkpoint: Path, size: int) -> None:
    parts = [Partition(ModelSpec.load(checkpoint), rank, size) for rank in range(size)]
    assert sum(part.num_heads for part in parts) == 4
    assert sum(part.num_ids for part in parts) == 512
    assert [part.first_kv_head for part in parts] == {1: [0], 2: [0, 1], 4: [0, 0, 1, 1]}[size]
    assert all(part.num_kv_heads == max(1, 2 // size) for part in parts)


_MEASURE = """
import sys, torch
from pathlib import Path
from paceline.kernels.backend import choose_backend
from paceline.workers.collectives import Solo
from paceline.workers.layers import Partition
from paceline.workers.model import Decoder
from paceline.workers.spec import ModelSpec

def anonymous_bytes(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024

class Rank(Solo):
    rank, size = 1, 2

class Peak:
    def __enter__(self):
        import threading
        self.peak, self.is_done = 0, False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self
    def watch(self):
        import time
        while not self.is_done:
            self.peak = max(self.peak, anonymous_bytes("RssAnon"))
            time.sleep(0.001)
    def __exit__(self, *_):
        self.is_done = True
        self.thread.join()

torch.set_num_threads(1)
path, device = Path(sys.argv[1]), torch.device("cpu")
torch.ops.mkldnn  # loaded before the baseline
torch.nn.functional.linear(torch.ones(4, 64), torch.ones(64, 64))
part = Partition(ModelSpec.load(path), 1, 2)
before = anonymous_bytes("RssAnon")
with Peak() as peak:
    decoder = Decoder(
        path, part, choose_backend(device), Rank(), max_len=64, dtype=torch.float32, device=device
    )
print(peak.peak - before)
"""


def test_loading_a_rank_peaks_below_1_3_of_its_part(tmp_path: Path) -> None:
    """Anonymous memory of a fresh process; pages of the mapped file are the page cache's, not ours."""
    path = make_checkpoint(
        tmp_path, "llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12, head_dim=128
    )
    num_values = sum(torch.Size(shape).numel() for shape in expected_shapes(ModelSpec.load(path)).values())
    measured = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)],
        # a fixed threshold: glibc raises its own, and then keeps pieces that were given back
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"},
        capture_output=True,
        text=True,
        check=True,
    )
    part_bytes = num_values * 4 // 2  # float32, half of the model
    assert part_bytes > 40e6
    kept_bytes = (
        48e6  # what the allocator may keep of the pieces it was given back, whatever the model's size
    )
    assert int(measured.stdout) < 1.1 * part_bytes + kept_bytes
