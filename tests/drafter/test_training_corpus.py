"""Several data directories as one: what is read, what is never trained on, what is refused."""

import json
from pathlib import Path

import pytest
from tiny import make_checkpoint
from trained import fill, make_target, settings_of, write_chats

from paceline.cluster.errors import ConfigError
from paceline.drafter.training.batches import Examples
from paceline.drafter.training.corpus import Corpus, note_shards, open_corpus
from paceline.drafter.training.data import find_prompts, find_shards
from paceline.drafter.training.prompts import Split


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("model") / "target")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory, target: Path) -> list[Path]:
    """Two directories of different seeds, whose questions overlap by half."""
    root = tmp_path_factory.mktemp("data")
    lines = write_chats(root / "chats.jsonl", 48).read_text().splitlines(keepends=True)
    for number, some in enumerate((lines[:32], lines[16:])):
        chats = root / f"chats-{number}.jsonl"
        chats.write_text("".join(some))
        settings = settings_of(prompts_file=str(chats), round_len=16, seed=number)
        fill(root / f"d{number}", target, settings, 10**9)
    return [root / "d0", root / "d1"]


def opened(directories: list[Path], out: Path, target: Path) -> Corpus:
    note_shards(directories, out / "shards.json")
    return open_corpus(directories, out / "shards.json", target)


def prompts_of(examples: Examples) -> list[tuple[int, ...]]:
    return [tuple(e.token_ids[: e.prompt_len].tolist()) for e in (examples[i] for i in range(len(examples)))]


def test_directories_are_read_as_one_and_each_prompt_once(
    tmp_path: Path, target: Path, machines: list[Path]
) -> None:
    corpus = opened(machines, tmp_path, target)

    splits: tuple[tuple[Examples, Split], ...] = ((corpus.train, "train"), (corpus.heldout, "heldout"))
    for examples, split in splits:
        found = prompts_of(examples)
        wanted = {tuple(p.token_ids) for directory in machines for p in find_prompts(directory, split)}
        assert set(found) == wanted
        assert len(found) == len(wanted)
    counts = corpus.train.token_counts(512)
    assert int(counts.sum()) == corpus.train.num_answer_tokens


def test_no_prompt_held_out_by_one_is_trained_on_through_another(
    tmp_path: Path, target: Path, machines: list[Path]
) -> None:
    heldout = {tuple(p.token_ids) for directory in machines for p in find_prompts(directory, "heldout")}
    shared = set.intersection(
        *({tuple(p.token_ids) for p in find_prompts(directory, "heldout")} for directory in machines)
    )
    assert shared, "both directories know some of the held-out prompts"

    assert not heldout & set(prompts_of(opened(machines, tmp_path, target).train))


def test_what_appears_later_is_not_read(tmp_path: Path, target: Path) -> None:
    """A directory that is written to: the first start decides, and a half-written file is none."""
    chats = write_chats(tmp_path / "chats.jsonl", 48)
    settings = settings_of(prompts_file=str(chats), round_len=16)
    directory = tmp_path / "d"
    fill(directory, target, settings, 100)
    (directory / "round-00000.train-009.safetensors.partial").write_bytes(b"half")
    first = opened([directory], tmp_path, target)

    fill(directory, target, settings, 10**9)
    again = opened([directory], tmp_path, target)

    assert prompts_of(again.train) == prompts_of(first.train)
    assert prompts_of(again.heldout) == prompts_of(first.heldout)
    assert sum(map(len, find_shards(directory, "train"))) > len(first.train)


def test_directories_that_do_not_go_together_are_refused(tmp_path: Path, machines: list[Path]) -> None:
    one, two = machines
    for name, value in (
        ("heldout_share", 0.5),
        ("tap_layer_ids", [0, 2]),
        ("tap_dtype", "float16"),
        ("target_digest", "x"),
    ):
        odd = tmp_path / name
        odd.mkdir()
        for file in two.iterdir():
            (odd / file.name).symlink_to(file)
        (odd / "data.json").unlink()
        (odd / "data.json").write_text(
            json.dumps(json.loads((two / "data.json").read_text()) | {name: value})
        )
        with pytest.raises(ConfigError, match=f"has {name} = "):
            note_shards([one, odd], tmp_path / "shards.json")
    with pytest.raises(ConfigError, match="given twice"):
        note_shards([one, one], tmp_path / "shards.json")
    assert not (tmp_path / "shards.json").exists()


def test_other_directories_do_not_continue_a_training(
    tmp_path: Path, target: Path, machines: list[Path]
) -> None:
    opened(machines, tmp_path, target)

    for other in (machines[:1], machines[::-1]):
        with pytest.raises(ConfigError, match="that the training began with"):
            opened(other, tmp_path, target)


def test_data_of_another_target_are_refused(tmp_path: Path, machines: list[Path]) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=1)

    with pytest.raises(ConfigError, match="written by another model"):
        opened(machines, tmp_path, other)
