"""Training data: what the target writes is what the engine writes, its tap rows are the model's, and a kill
costs nothing but the shard that was being made."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import TAP_LAYER_IDS, fill, make_target, make_writer, settings_of, write_chats
from transformers import AutoModelForCausalLM

from paceline.cluster.errors import ConfigError
from paceline.deploy.api.text import Tokenizer
from paceline.deploy.training.writer import TargetWriter
from paceline.drafter.training.data import default_taps, find_prompts, find_shards
from paceline.drafter.training.prompts import Frame, invent, read_chats
from paceline.drafter.training.shards import Shard, write_shard
from paceline.drafter.training.writing import Task

CLI_SETTINGS = {
    "tokens": 500,
    "places": 8,
    "taps": "0,1",
    "tap-dtype": "float32",
    "round-len": 12,
    "shard-len": 4,
    "max-prompt-len": 64,
    "max-answer-len": 24,
    "heldout-share": 0.25,
    "threads": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 40)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, target: Path, chats: Path) -> Path:
    directory = tmp_path_factory.mktemp("data") / "d"
    reports = fill(directory, target, settings_of(prompts_file=str(chats)), 500)
    assert reports[-1].num_tokens >= 500
    return directory


@pytest.fixture(scope="module")
def writer(target: Path) -> TargetWriter:
    return make_writer(target, num_places=3)


def tasks(count: int) -> list[Task]:
    return [
        Task(
            prompt_ids=[3 + index, 5, 7 * index + 1][: 1 + index % 3] * 4,
            max_tokens=6 + index,
            stop_ids=frozenset(),
            seed=index,
            temperature=float(index % 2),
            top_p=0.9 if index % 4 == 1 else 1.0,
        )
        for index in range(count)
    ]


def test_rows_and_greedy_tokens_are_the_models(writer: TargetWriter, target: Path) -> None:
    """Tap j is the residual stream after block j; a shift by one block or one token would be seen."""
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for written in writer.write(iter(tasks(7)), with_taps=True):
        token_ids = torch.tensor(written.token_ids)
        with torch.inference_mode():
            out = model(token_ids[None], output_hidden_states=True)
        rows = torch.stack([out.hidden_states[layer_id + 1][0] for layer_id in TAP_LAYER_IDS], 1)
        assert written.taps is not None
        assert torch.allclose(written.taps, rows[:-1], atol=1e-4)
        shifted = torch.stack([out.hidden_states[layer_id][0] for layer_id in TAP_LAYER_IDS], 1)
        assert not torch.allclose(written.taps, shifted[:-1], atol=1e-1)
        if written.index % 2 == 0:
            expected = out.logits[0, written.prompt_len - 1 : -1].argmax(-1)
            assert written.token_ids[written.prompt_len :] == expected.tolist()


def test_a_sequence_does_not_depend_on_what_is_written_beside_it(writer: TargetWriter) -> None:
    wanted = tasks(8)

    together = {w.index: w for w in writer.write(iter(wanted), with_taps=True)}
    alone = [next(writer.write(iter([task]), with_taps=True)) for task in wanted]

    for index, written in enumerate(alone):
        assert together[index].token_ids == written.token_ids
        rows, alone_rows = together[index].taps, written.taps
        assert rows is not None
        assert alone_rows is not None
        assert torch.equal(rows, alone_rows)


def test_a_stop_token_ends_a_sequence(writer: TargetWriter) -> None:
    (task,) = tasks(1)
    (free,) = writer.write(iter([dataclasses.replace(task, max_tokens=20)]), with_taps=False)
    stop_id = free.answer_ids[4]

    stopping = dataclasses.replace(task, max_tokens=20, stop_ids=frozenset({stop_id}))
    (written,) = writer.write(iter([stopping]), with_taps=False)

    assert written.is_stopped
    assert written.token_ids[-1] == stop_id
    assert written.answer_ids == free.answer_ids[: free.answer_ids.index(stop_id)]


def test_shards_hold_what_was_written(data: Path, target: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = {tuple(prompt.token_ids) for prompt in find_prompts(data, "train")}
    shards = find_shards(data, "train")
    temperatures = {round(shard[index].temperature, 3) for shard in shards for index in range(len(shard))}
    assert temperatures == {0.0, 0.7}
    for shard in shards:
        for index in range(len(shard)):
            example = shard[index]
            assert tuple(example.token_ids[: example.prompt_len].tolist()) in prompts
            with torch.inference_mode():
                hidden = model(example.token_ids[None], output_hidden_states=True).hidden_states
            rows = torch.stack([hidden[layer_id + 1][0] for layer_id in TAP_LAYER_IDS], 1)
            assert torch.allclose(example.taps[:-1], rows[:-1], atol=1e-4)
    assert sum(shard.num_answer_tokens for shard in shards) >= 500


def test_prompts_are_unique_and_the_split_is_theirs(data: Path) -> None:
    train, heldout = find_prompts(data, "train"), find_prompts(data, "heldout")
    keys = [prompt.key for prompt in (*train, *heldout)]

    assert len(set(keys)) == len(keys)
    assert heldout
    answered = {
        tuple(shard[i].token_ids[: shard[i].prompt_len].tolist())
        for shard in find_shards(data, "train")
        for i in range(len(shard))
    }
    assert not answered & {tuple(prompt.token_ids) for prompt in heldout}
    assert all(s[i].temperature == 0 for s in find_shards(data, "heldout") for i in range(len(s)))


def test_a_killed_run_ends_with_the_same_files(tmp_path: Path, target: Path, data: Path, chats: Path) -> None:
    """kill -9 of the command line while it writes; then to the end."""
    directory = tmp_path / "d"
    command = [sys.executable, "-m", "paceline.deploy.train", "data", "--out", str(directory)]
    command += ["--model", str(target), "--prompts", str(chats)]
    command += [f"--{name}={value}" for name, value in CLI_SETTINGS.items()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None and not list(directory.glob("*.train-*.safetensors")):
        time.sleep(0.002)
    process.kill()
    process.wait()
    num_left = len(list(directory.iterdir()))
    fill(directory, target, settings_of(prompts_file=str(chats)), 500)

    assert num_left < len(list(directory.iterdir())), "it was killed in time"
    names = sorted(file.name for file in data.iterdir())
    assert sorted(file.name for file in directory.iterdir() if not file.name.endswith(".partial")) == names
    for name in names:
        assert (directory / name).read_bytes() == (data / name).read_bytes(), name


def test_more_tokens_continue_a_directory(tmp_path: Path, target: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 30)
    turns = [{"role": "user", "content": "what is 3?"}, {"role": "assistant", "content": "a number"}]
    with open(chats, "a") as file:
        file.write(json.dumps({"messages": turns}) + "\n")
    settings = settings_of(prompts_file=str(chats))

    fill(tmp_path / "d", target, settings, 40)
    first = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "d").iterdir()}
    fill(tmp_path / "d", target, settings, 10**9)  # ends with the file of prompts

    assert first.items() <= {f.name: f.stat().st_mtime_ns for f in (tmp_path / "d").iterdir()}.items()
    prompts = find_prompts(tmp_path / "d", "train") + find_prompts(tmp_path / "d", "heldout")
    assert len(prompts) == 31
    assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
    num_answers = sum(len(s) for split in ("train", "heldout") for s in find_shards(tmp_path / "d", split))
    assert num_answers == 31


def test_other_settings_are_refused(data: Path, target: Path, chats: Path) -> None:
    with pytest.raises(ConfigError, match="begun with max_answer_len = 24, not 16"):
        fill(data, target, settings_of(prompts_file=str(chats), max_answer_len=16), 10)


def test_rows_that_do_not_fit_their_dtype_are_refused(tmp_path: Path, target: Path) -> None:
    writer = make_writer(target)
    (written,) = writer.write(iter(tasks(1)), with_taps=True)
    assert written.taps is not None
    written.taps[0, 0, 0] = float("inf")
    with pytest.raises(ConfigError, match="--tap-dtype bfloat16"):
        write_shard(tmp_path / "s.safetensors", [written], [0], [0.0])
    assert not (tmp_path / "s.safetensors").exists()
    (tmp_path / "s.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="is no shard"):
        Shard(tmp_path / "s.safetensors")


def test_invented_questions_are_the_same_for_a_seed(target: Path) -> None:
    text = Tokenizer.load(target)
    writer = make_writer(target, max_len=48)

    first, again, other = (list(invent(writer, text, 12, seed)) for seed in (3, 3, 4))

    assert first == again != other
    for _, (message,) in first:
        assert message["role"] == "user"
        assert len(message["content"]) > 3


def test_the_frame_is_what_the_template_writes_around_a_turn(target: Path) -> None:
    text = Tokenizer.load(target)

    frame = Frame.of(text)

    rendered = text.render_chat([{"role": "user", "content": "fox"}])
    assert rendered == frame.before + text.encode_word("fox") + frame.after


@pytest.mark.parametrize("line", ["{", "{}", '{"messages": [{"role": 1, "content": "x"}]}', "[]"])
def test_a_wrong_line_of_prompts_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line + "\n")

    with pytest.raises(ConfigError, match="line 2"):
        read_chats(file)


def test_taps_follow_the_published_rule() -> None:
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(36, 5) == (1, 9, 17, 25, 33)
    assert default_taps(24, 1) == (12,)
