"""Two processes that share the weights train as two that have copies, and go on where they were killed."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trained import CPU, fill, make_target, settings_of, write_chats

from paceline.cluster.errors import ConfigError
from paceline.deploy.ingress import free_port
from paceline.drafter.training.fit import FitPace, FitSettings, Ranks, fit

SETTINGS = (
    "--block 4 --mask-token-id 500 --passes 10 --batch-size 2 --anchors 6 --warmup-steps 5 --max-vocab 0"
)
SETTINGS += " --log-every 5 --save-every 10 --threads 1 --device cpu"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    root = tmp_path_factory.mktemp("data")
    chats = write_chats(root / "chats.jsonl", 16)
    fill(root / "d", target, settings_of(prompts_file=str(chats), round_len=16, shard_len=16), 10**9)
    return root / "d"


def start(data: Path, target: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "-m", "paceline.deploy.train", "fit"]
    command += ["--data", str(data), "--out", str(out), "--model", str(target), *SETTINGS.split(), *options]
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def losses_of(out: Path) -> list[float]:
    return [float(row["loss"]) for row in csv.DictReader((out / "log.csv").read_text().splitlines())]


@pytest.mark.slow
def test_shards_train_as_copies_do_and_go_on_after_a_kill(tmp_path: Path, target: Path, data: Path) -> None:
    copies, shards, killed = tmp_path / "copies", tmp_path / "shards", tmp_path / "killed"
    assert start(data, target, copies).wait() == 0
    assert start(data, target, shards, "--shard").wait() == 0
    process = start(data, target, killed, "--shard")
    while process.poll() is None and not (killed / "state.safetensors").exists():
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (killed / "drafter" / "model.safetensors").exists(), "it was killed in time"
    assert start(data, target, killed, "--shard").wait() == 0

    whole = losses_of(copies)
    assert whole[-1] < whole[0] - 1
    assert losses_of(shards) == pytest.approx(whole, rel=1e-4)
    assert losses_of(killed) == losses_of(shards)
    states = [load_file(out / "state.safetensors") for out in (copies, shards, killed)]
    for name, weight in states[0].items():
        if name.startswith("weight/"):
            assert torch.allclose(states[1][name], weight, atol=1e-3), name
        assert torch.equal(states[2][name], states[1][name]), name


def test_one_process_has_nothing_to_share(tmp_path: Path, target: Path, data: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to share"):
        fit(
            [data], target, tmp_path, FitSettings(), FitPace(), CPU, lambda *_: None, Ranks(), is_sharded=True
        )
