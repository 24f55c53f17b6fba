"""Training to its end, and what it ends with: a drafter that the engine loads and that knows its target."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from streams import tiny_config
from trained import CPU, TAP_LAYER_IDS, fill, make_target, settings_of, write_chats

from paceline.cluster.errors import ConfigError
from paceline.cluster.messages import SamplingParams
from paceline.deploy.assemble import start_local_engine
from paceline.drafter.spec import DrafterSpec
from paceline.drafter.target import Target
from paceline.drafter.training.batches import Examples
from paceline.drafter.training.curves import StepRecord
from paceline.drafter.training.data import find_shards
from paceline.drafter.training.fit import FitPace, FitSettings, Fitted, Ranks, fit
from paceline.drafter.training.network import DrafterNetwork
from paceline.drafter.training.walk import walk
from paceline.drafter.weights import load_weights

BLOCK_SIZE = 4
SETTINGS = FitSettings(
    num_layers=2,
    block_size=BLOCK_SIZE,
    mask_token_id=500,
    passes=50.0,
    batch_size=4,
    num_anchors=12,
    lr=3e-3,
    warmup_steps=10,
    max_vocab=0,
)
CLI_SETTINGS = {
    "layers": 2,
    "block": BLOCK_SIZE,
    "mask-token-id": 500,
    "passes": 50,
    "batch-size": 4,
    "anchors": 12,
    "lr": 3e-3,
    "warmup-steps": 10,
    "max-vocab": 0,
    "log-every": 20,
    "save-every": 50,
}
PACE = FitPace(log_every=20, save_every=50, walk_every=10_000, walk_len=4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path) -> Path:
    """Greedy answers to a dozen questions."""
    root = tmp_path_factory.mktemp("data")
    chats = write_chats(root / "chats.jsonl", 16)
    settings = settings_of(prompts_file=str(chats), sampled_share=0.0, round_len=16, shard_len=16)
    fill(root / "d", target, settings, 10**9)
    return root / "d"


def run_fit(data: Path, target: Path, out: Path, settings: FitSettings) -> tuple[Fitted, list[StepRecord]]:
    torch.set_num_threads(1)
    records: list[StepRecord] = []
    fitted = fit([data], target, out, settings, PACE, CPU, lambda record, _: records.append(record), Ranks())
    return fitted, records


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory, target: Path, data: Path) -> Fitted:
    fitted, records = run_fit(data, target, tmp_path_factory.mktemp("fit") / "out", SETTINGS)
    assert records[-1].step == fitted.num_steps
    assert records[-1].loss < records[0].loss / 5
    return fitted


def test_an_overfitted_drafter_is_accepted_in_the_engine(data: Path, target: Path, fitted: Fitted) -> None:
    """At least 95 % of the drafts stand, and the walk over recorded text counts the same verifies."""
    examples = Examples(find_shards(data, "train"))
    engine_accepted: list[int] = []
    engine_drafted: list[int] = []
    num_verifies = 0

    async def run() -> None:
        nonlocal num_verifies
        engine = await start_local_engine(tiny_config(drafter=str(fitted.path), prompt_lookup=False), target)
        for index in range(len(examples)):
            example = examples[index]
            prompt = example.token_ids[: example.prompt_len].tolist()
            params = SamplingParams(max_tokens=example.answer_len, temperature=0.0, stop_token_ids=[2])
            token_ids: list[int] = []
            num_steps = 0
            async for output in engine.stream(f"r{index}", prompt, params):
                token_ids += output.token_ids
                num_steps += bool(output.token_ids)
                if output.num_drafts:
                    engine_accepted.append(output.num_accepted)
                    engine_drafted.append(output.num_drafts)
            assert token_ids == example.token_ids[example.prompt_len :].tolist()
            num_verifies += num_steps - 1
        await engine.close()

    asyncio.run(run())

    assert sum(engine_accepted) / sum(engine_drafted) >= 0.95
    network = load_network(fitted.path, target)
    whole = Target.load(target, 512, torch.float32, CPU)
    assert whole.head is not None
    walked = walk(network, [examples[i] for i in range(len(examples))], whole.embedding, whole.head)
    assert walked.num_verifies == num_verifies
    assert walked.per_slot[0] >= 0.95


def load_network(path: Path, target_path: Path) -> DrafterNetwork:
    target = Target.load(target_path, 512, torch.float32, CPU)
    spec = DrafterSpec.load(path, target)
    network = DrafterNetwork(spec, 128)
    network.take(load_weights(path, spec, target, torch.float32, CPU))
    return network.eval()


def test_a_vocabulary_of_its_own_is_drafted_from(tmp_path: Path, target: Path, data: Path) -> None:
    """It holds all that the answers are made of, so as much stands; text is the target's as ever."""
    settings = dataclasses.replace(SETTINGS, export_vocab=200)
    fitted, _ = run_fit(data, target, tmp_path / "out", settings)
    weights = load_file(fitted.path / "model.safetensors")
    assert weights["lm_head.weight"].shape == (200, 64)
    assert int(weights["t2d"].sum()) == 200

    example = Examples(find_shards(data, "train"))[0]
    wanted = example.token_ids[example.prompt_len :].tolist()
    token_ids: list[int] = []
    num_accepted = num_drafts = 0

    async def run() -> None:
        nonlocal num_accepted, num_drafts
        engine = await start_local_engine(tiny_config(drafter=str(fitted.path), prompt_lookup=False), target)
        params = SamplingParams(max_tokens=len(wanted), temperature=0.0, stop_token_ids=[2])
        async for output in engine.stream("r", example.token_ids[: example.prompt_len].tolist(), params):
            token_ids.extend(output.token_ids)
            num_accepted, num_drafts = num_accepted + output.num_accepted, num_drafts + output.num_drafts
        await engine.close()

    asyncio.run(run())

    assert token_ids == wanted
    assert num_accepted / num_drafts >= 0.9


def test_the_result_is_in_the_published_layout(fitted: Fitted) -> None:
    config = json.loads((fitted.path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["layer_types"] == ["full_attention"] * 2
    assert config["dflash_config"] == {
        "block_size": BLOCK_SIZE,
        "mask_token_id": 500,
        "target_layer_ids": list(TAP_LAYER_IDS),
    }
    weights = load_file(fitted.path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["fc.weight"].shape == (64, 128)
    card = (fitted.path / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert f"answer tokens seen: {fitted.num_tokens}" in card
    assert (fitted.path.parent / "curves.png").stat().st_size > 1000


def test_killed_training_ends_with_the_same_weights(
    tmp_path: Path, target: Path, data: Path, fitted: Fitted
) -> None:
    """kill -9 behind a checkpoint, between two of them; the rest runs to the same loss and the same bits."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "paceline.deploy.train", "fit", "--data", str(data), "--out", str(out)]
    command += ["--model", str(target), "--threads", "1", "--device", "cpu"]
    command += [f"--{name}={value}" for name, value in CLI_SETTINGS.items()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not (out / "state.safetensors").exists():
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert not (out / "drafter" / "model.safetensors").exists(), "it was killed in time"

    resumed, records = run_fit(data, target, out, SETTINGS)

    assert records[0].step == 80
    assert resumed.loss == fitted.loss
    whole, again = (load_file(path / "model.safetensors") for path in (fitted.path, resumed.path))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    logs = [(path.parent / "log.csv").read_text().splitlines() for path in (fitted.path, resumed.path)]
    assert [line.split(",")[5:] for line in logs[0]] == [line.split(",")[5:] for line in logs[1]]


def test_other_settings_do_not_continue_a_training(target: Path, data: Path, fitted: Fitted) -> None:
    changed = FitSettings(**{**{f: getattr(SETTINGS, f) for f in SETTINGS.__slots__}, "lr": 1e-4})

    with pytest.raises(ConfigError, match=r"lr = 0.003, not 0.0001"):
        run_fit(data, target, fitted.path.parent, changed)


def test_training_goes_on_from_a_drafter(tmp_path: Path, target: Path, data: Path, fitted: Fitted) -> None:
    settings = FitSettings(
        block_size=BLOCK_SIZE, mask_token_id=500, passes=1.0, batch_size=4, init=str(fitted.path), lr=1e-9
    )

    again, records = run_fit(data, target, tmp_path / "out", settings)

    assert records[0].loss < 1.0
    whole, same = (load_file(path / "model.safetensors") for path in (fitted.path, again.path))
    assert all(torch.allclose(whole[name].float(), same[name].float(), atol=1e-3) for name in whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 9}, "9 draft layers; choose 1 to 3"),
        ({"block_size": 1}, "drafts nothing"),
        ({"mask_token_id": 5000}, "outside the vocabulary"),
        ({"passes": 0.0}, "must be above 0"),
        ({"export_vocab": 512}, "must be smaller than the 512 tokens"),
        ({"init": "INIT", "num_layers": 1}, "has num_layers 2, and 1 is wanted"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, target: Path, data: Path, fitted: Fitted, changes: dict[str, object], message: str
) -> None:
    if "init" in changes:
        changes = {**changes, "init": str(fitted.path)}
    settings = FitSettings(**{"block_size": BLOCK_SIZE, "mask_token_id": 500, **changes})  # pyright: ignore[reportArgumentType]

    with pytest.raises(ConfigError, match=message):
        run_fit(data, target, tmp_path / "out", settings)
