"""`paceline train` as a user runs it: all stages of a preset, on a bare machine, over Ray Train."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from trained import fill, make_target, settings_of, write_chats

from paceline.deploy.cli import main
from paceline.drafter.training.fit import FitPace, FitSettings

BARE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("msgspec", "zmq", "ray", "fastapi", "pydantic_settings"):
            raise ImportError(f"{name} is not here")

sys.meta_path.insert(0, Absent())
from paceline.deploy.train import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 60)


def test_a_bare_machine_makes_data_and_trains(tmp_path: Path, target: Path, chats: Path) -> None:
    """Neither msgspec nor Ray nor sockets; one process each, as on a GPU machine with torch alone."""
    bare = [sys.executable, "-c", BARE]
    common = ["--model", str(target), "--threads", "1", "--device", "cpu"]
    made = ["data", "--out", str(tmp_path / "d"), "--tokens", "100", "--prompts", str(chats), "--taps", "0,1"]
    made += ["--places", "8", "--round-len", "60", "--max-answer-len", "12", "--shard-len", "20"]
    made += ["--keep-last", *common]
    trained = ["fit", "--data", str(tmp_path / "d"), "--out", str(tmp_path / "f"), "--passes", "0.1"]
    trained += ["--block", "4", "--distill", "0.3", *common]
    for command in (made, trained):
        done = subprocess.run([*bare, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "f" / "drafter" / "model.safetensors").stat().st_size > 1000
    assert "held-out walk" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "give --out DIR"),
        (
            ["train", "--out", "x", "--preset", "mine", "--model", "MODEL"],
            "choose one of smollm2-demo, laptop",
        ),
        (["train", "--out", "x", "--scale", "2", "--model", "MODEL"], "scale 2.0 is not above 0"),
        (["train", "data", "--out", "x", "--taps", "a", "--model", "MODEL"], "no list of block numbers"),
        (
            ["train", "data", "--out", "x", "--dtype", "int8", "--model", "MODEL"],
            "choose float32 or bfloat16",
        ),
        (["train", "fit", "--data", "nothing", "--out", "x", "--model", "MODEL"], "is no data directory"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    target: Path,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = main([str(target) if argument == "MODEL" else argument for argument in arguments])

    stderr = capsys.readouterr().err
    assert code == 2
    assert message in stderr
    assert stderr.count("\n") == 1


@pytest.mark.slow
def test_a_preset_runs_all_stages_and_ends_at_once_when_repeated(
    tmp_path: Path, target: Path, chats: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--preset=laptop", f"--out={tmp_path}", "--scale=0.0005", f"--model={target}"]
    command += [f"--prompts={chats}", "--threads=1"]

    assert main(command) == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    weights = (tmp_path / "fit" / "drafter" / "model.safetensors").read_bytes()

    assert {score["domain"] for score in scores} >= {"chat", "summarise", "extract"}
    assert {score["drafter"].rpartition("/")[2] for score in scores} == {"drafter", "ngram", "drafter+ngram"}
    assert all(score["mean_tokens_per_verify"] >= 1 for score in scores)
    assert "| ngram | extract | 1 |" in capsys.readouterr().out
    assert main(command) == 0
    assert (tmp_path / "fit" / "drafter" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_the_gpu_preset_runs_all_stages_at_a_small_scale(tmp_path: Path, default_model: Path) -> None:
    """The twelve minutes of one GPU, rehearsed here with a thousandth of the tokens and the real model."""
    code = main(
        ["train", "--preset=smollm2-demo", f"--out={tmp_path}", "--scale=0.001", f"--model={default_model}"]
    )

    assert code == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert {score["domain"] for score in scores} >= {"summarise", "extract"}
    assert {score["drafter"].rpartition("/")[2] for score in scores} == {"drafter", "ngram", "drafter+ngram"}
    assert all(score["mean_tokens_per_verify"] >= 1 for score in scores)
    assert (tmp_path / "fit" / "drafter" / "model.safetensors").stat().st_size < 35e6


@pytest.mark.slow
@pytest.mark.usefixtures("ray_local")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # Ray Data sets its own old options
def test_ray_train_runs_two_workers(tmp_path: Path, target: Path, chats: Path) -> None:
    from paceline.drafter.training.ray_road import fit_on_ray

    fill(tmp_path / "d", target, settings_of(prompts_file=str(chats), round_len=60), 10**9)
    settings = FitSettings(block_size=4, mask_token_id=500, passes=6.0, batch_size=4, num_anchors=8, lr=3e-3)

    fit_on_ray([tmp_path / "d"], target, tmp_path / "f", settings, FitPace(log_every=5), 2, use_gpu=False)

    rows = list(csv.DictReader((tmp_path / "f" / "log.csv").read_text().splitlines()))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert (tmp_path / "f" / "drafter" / "model.safetensors").stat().st_size > 1000
