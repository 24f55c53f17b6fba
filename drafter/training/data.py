"""Prompts to answers to shards, in rounds, resumable after a kill at any moment.

    data.json                       the settings; a directory is continued with the same only
    round-00000.prompts.jsonl       a round's prompts, without any that an earlier round has
    round-00000.train-000.safetensors, .heldout-000.safetensors, ...

Whatever has its final name is whole and never changes. A round is made in a fixed order from its own seed, so
a directory that was killed and continued ends with the files of one that was not. Answers of a round fill the
device's places without a gap from shard to shard.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...cluster.errors import ConfigError
from .prompts import (
    Prompt,
    Split,
    Text,
    invent,
    load_prompts,
    make_prompt,
    read_chats,
    save_prompts,
    share_of,
)
from .shards import Shard, publish, write_shard
from .writing import Task, Writer, Written

TAP_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_MAX_ROUNDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """What decides the content of a data directory."""

    tap_layer_ids: tuple[int, ...]
    tap_dtype: str = "float16"
    prompts_file: str | None = None  # None: the target invents them
    round_len: int = 1024  # prompts
    shard_len: int = 128  # sequences
    max_prompt_len: int = 256
    max_answer_len: int = 256
    heldout_share: float = 0.04
    sampled_share: float = 0.5  # of the training answers; the others and all held-out ones are greedy
    temperature: float = 0.7
    seed: int = 0
    target_digest: str | None = None  # of the model that answers
    keeps_last: bool = False  # the state behind the last block too, for distillation

    @property
    def max_len(self) -> int:
        return self.max_prompt_len + self.max_answer_len

    @property
    def tap_torch_dtype(self) -> torch.dtype:
        return TAP_DTYPES[self.tap_dtype]

    def check(self) -> None:
        """Raise ConfigError for what makes no data."""
        if self.tap_dtype not in TAP_DTYPES:
            raise ConfigError(f"tap_dtype {self.tap_dtype!r} is unknown; choose {', '.join(TAP_DTYPES)}")
        if not 0 <= self.heldout_share < 1 or not 0 <= self.sampled_share <= 1:
            raise ConfigError("heldout_share and sampled_share are shares; give numbers from 0 to 1")
        if min(self.round_len, self.shard_len, self.max_prompt_len, self.max_answer_len) < 1:
            raise ConfigError("lengths of rounds, shards, prompts and answers must be at least 1")


@dataclass(frozen=True, slots=True)
class DataProgress:
    """How far the data are; answer tokens of the training split."""

    num_tokens: int
    wanted_tokens: int
    tokens_per_s: float  # of all answers, since this process began; prompts and their invention included
    num_prompts: int


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """The published rule: from block 1 to three before the last, evenly; one tap: the middle."""
    if num_taps == 1:
        return (num_layers // 2,)
    ids = {round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps)}
    return tuple(sorted(ids & set(range(num_layers))))  # fewer in a target of a few blocks


def make_data(
    directory: Path,
    writer: Writer,
    text: Text,
    settings: DataSettings,
    wanted_tokens: int,
    report: Callable[[DataProgress], None],
    max_minutes: float | None = None,
) -> None:
    """Add rounds to `directory` until it holds `wanted_tokens` of training answers, or the time is over.

    Raises ConfigError for a directory of other settings, or a disk that is too small; with a file of prompts
    it may end before, when the file does.
    """
    settings.check()
    _take_settings(directory, settings)
    chats = None if settings.prompts_file is None else read_chats(Path(settings.prompts_file))
    began_s, num_new = time.perf_counter(), 0
    num_tokens = num_prompts = 0
    known: set[str] = set()
    for number in range(_MAX_ROUNDS):
        prompts = _prompts_of(directory, number, writer, text, settings, chats, known)
        if prompts is None:
            return
        known.update(prompt.key for prompt in prompts)
        num_prompts += len(prompts)
        for split, shard, is_new in _answers(directory, number, prompts, writer, settings):
            if split == "train":
                num_tokens += shard.num_answer_tokens
            num_new += shard.num_answer_tokens if is_new else 0
            rate = num_new / (time.perf_counter() - began_s)
            if is_new:
                report(DataProgress(num_tokens, wanted_tokens, rate, num_prompts))
            is_late = max_minutes is not None and time.perf_counter() - began_s > 60 * max_minutes
            if num_tokens >= wanted_tokens or is_late:
                return


def find_shards(directory: Path, split: Split) -> list[Shard]:
    """Open the shards of a split that are whole, in order."""
    return [Shard(path) for path in sorted(directory.glob(f"round-*.{split}-*.safetensors"))]


def find_prompts(directory: Path, split: Split) -> list[Prompt]:
    """Every prompt of a split."""
    paths = sorted(directory.glob("round-*.prompts.jsonl"))
    return [prompt for path in paths for prompt in load_prompts(path) if prompt.split == split]


def read_settings(directory: Path) -> dict[str, Any]:
    """What `data.json` says; ConfigError when there is none."""
    try:
        return json.loads((directory / "data.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{directory} is no data directory ({error}); make one with `paceline train data`"
        ) from None


def _take_settings(directory: Path, settings: DataSettings) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    wanted = json.loads(json.dumps(asdict(settings)))
    file = directory / "data.json"
    if not file.exists():
        partial = file.with_name("data.json.partial")
        partial.write_text(json.dumps(wanted, indent=1) + "\n")
        publish(partial, file)
    found = read_settings(directory)
    found = {"keeps_last": False, "target_digest": wanted["target_digest"], **found}  # of an older directory
    if different := [name for name in wanted if found.get(name) != wanted[name]]:
        name = different[0]
        raise ConfigError(
            f"{directory} was begun with {name} = {found.get(name)!r}, not {wanted[name]!r}; "
            "keep the setting or choose another directory"
        )


def _prompts_of(
    directory: Path,
    number: int,
    writer: Writer,
    text: Text,
    settings: DataSettings,
    chats: list[list[dict[str, str]]] | None,
    known: set[str],
) -> list[Prompt] | None:
    """The prompts of a round, made if need be; None behind the end of a file of prompts."""
    file = directory / f"round-{number:05}.prompts.jsonl"
    if file.exists():
        return load_prompts(file)
    first = number * settings.round_len
    if chats is None:
        found = invent(writer, text, settings.round_len, settings.seed * _MAX_ROUNDS + number)
    elif first < len(chats):
        found = (("chat", chat) for chat in chats[first : first + settings.round_len])
    else:
        return None
    prompts: dict[str, Prompt] = {}
    for domain, messages in found:
        prompt = make_prompt(messages, domain, text, settings.heldout_share, settings.max_prompt_len)
        if prompt is not None and prompt.key not in known:
            prompts.setdefault(prompt.key, prompt)
    partial = file.with_name(f"{file.name}.partial")
    save_prompts(partial, list(prompts.values()))
    publish(partial, file)
    return list(prompts.values())


def _answers(
    directory: Path, number: int, prompts: list[Prompt], writer: Writer, settings: DataSettings
) -> Iterator[tuple[Split, Shard, bool]]:
    """Every shard of a round in order, and whether it had to be made."""
    plan = _plan(directory, number, prompts, settings)
    missing = [(path, wanted) for _, path, wanted in plan if not path.exists()]
    made = _make_shards(missing, prompts, writer, settings)
    for split, path, _ in plan:
        is_new = not path.exists()
        if is_new:
            assert next(made) == path, "shards are made in the order of the plan"
        yield split, Shard(path), is_new


def _plan(
    directory: Path, number: int, prompts: list[Prompt], settings: DataSettings
) -> list[tuple[Split, Path, list[int]]]:
    """(split, file, indices of prompts) of every shard of a round; held-out ones first."""
    plan: list[tuple[Split, Path, list[int]]] = []
    splits: tuple[Split, ...] = ("heldout", "train")
    for split in splits:
        indices = [index for index, prompt in enumerate(prompts) if prompt.split == split]
        for part, first in enumerate(range(0, len(indices), settings.shard_len)):
            path = directory / f"round-{number:05}.{split}-{part:03}.safetensors"
            plan.append((split, path, indices[first : first + settings.shard_len]))
    return plan


def _make_shards(
    missing: list[tuple[Path, list[int]]], prompts: list[Prompt], writer: Writer, settings: DataSettings
) -> Iterator[Path]:
    """Write the missing shards, each as soon as its last answer is there; later ones are begun meanwhile."""
    order = [index for _, indices in missing for index in indices]
    tasks = [_task(prompts[index], writer, settings) for index in order]
    written = writer.write(iter(tasks), with_taps=True)
    done: dict[int, Written] = {}  # by place in `order`
    first = 0
    for path, indices in missing:
        wanted = range(first, first + len(indices))
        while not all(place in done for place in wanted):
            sequence = next(written)
            done[sequence.index] = sequence
        sequences = [done.pop(place) for place in wanted]
        _check_disk(path, sequences)
        temperatures = [tasks[place].temperature for place in wanted]
        write_shard(path, sequences, indices, temperatures, with_last=settings.keeps_last)
        first += len(indices)
        yield path


def _task(prompt: Prompt, writer: Writer, settings: DataSettings) -> Task:
    is_sampled = prompt.split == "train" and share_of(prompt.key, "sampled") < settings.sampled_share
    return Task(
        prompt_ids=prompt.token_ids,
        max_tokens=settings.max_answer_len,
        stop_ids=frozenset(writer.stop_ids),
        seed=int(share_of(prompt.key, f"seed {settings.seed}") * 2**48),
        temperature=settings.temperature if is_sampled else 0.0,
    )


def _check_disk(path: Path, sequences: list[Written]) -> None:
    """Raise ConfigError before a disk is full: what else writes to it would fail too."""
    num_bytes = sum(sequence.taps.nbytes for sequence in sequences if sequence.taps is not None)
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < 2 * num_bytes + (1 << 30):
        raise ConfigError(
            f"{path.parent}: {free_bytes >> 20} MiB are free, and a shard takes {num_bytes >> 20} MiB; "
            "free some space and start the same command again"
        )
