"""What a training reads: the shards of one data directory or of several, as they are when it begins.

Directories may be made by several machines at once, each with a seed of its own, and may still grow. What is
whole at the start is noted in OUT/shards.json; a training that was killed goes on with those files alone.

A prompt's split is a function of its text and of the share that is held out. Directories of one share agree
on every prompt, so none held out by one is trained on through another; other shares are refused.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from .batches import Examples
from .data import find_shards, read_settings
from .prompts import Split
from .shape import TargetShape, target_digest
from .shards import Shard, publish

_SHARED = ("tap_layer_ids", "tap_dtype", "heldout_share")  # what directories must agree on
_SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The sequences of a training. A prompt that several directories have is read once."""

    train: Examples
    heldout: Examples
    tap_layer_ids: tuple[int, ...]
    has_last: bool  # of every training sequence the state behind the target's last block


def note_shards(directories: Sequence[Path], file: Path) -> None:
    """Write to `file` which shards are there; nothing if it has been written before.

    Raises ConfigError for directories that do not go together, and when there is nothing to train on.
    """
    if file.exists():
        return
    found = [read_settings(directory) for directory in directories]
    _check_agreement(directories, found)
    parts = [
        {
            "settings": settings,
            **{split: [shard.path.name for shard in find_shards(directory, split)] for split in _SPLITS},
        }
        for directory, settings in zip(directories, found, strict=True)
    ]
    for split in _SPLITS:
        if not any(part[split] for part in parts):
            names = ", ".join(str(directory) for directory in directories)
            raise ConfigError(f"{names}: no {split} data; make some with `paceline train data`")
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(parts, indent=1) + "\n")
    publish(partial, file)


def open_corpus(directories: Sequence[Path], file: Path, model_path: Path) -> Corpus:
    """The shards that `file` names. Raises ConfigError for other directories, or data of another target."""
    parts = json.loads(file.read_text())
    found = [read_settings(directory) for directory in directories]
    if found != [part["settings"] for part in parts]:
        raise ConfigError(
            f"{file} names other data than {', '.join(map(str, directories))}; give the directories that the "
            "training began with, in their order, or choose another --out"
        )
    shards = {
        split: [
            Shard(directory / name)
            for directory, part in zip(directories, parts, strict=True)
            for name in part[split]
        ]
        for split in _SPLITS
    }
    tap_layer_ids = tuple(found[0]["tap_layer_ids"])
    _check_target(found, shards["train"], len(tap_layer_ids), model_path)
    has_last = all(shard.has_last for shard in shards["train"])
    return Corpus(Examples(shards["train"]), Examples(shards["heldout"]), tap_layer_ids, has_last)


def _check_agreement(directories: Sequence[Path], found: Sequence[dict[str, Any]]) -> None:
    for directory, settings in zip(directories, found, strict=True):
        for name in (*_SHARED, "target_digest"):
            first, other = found[0].get(name), settings.get(name)
            is_unknown = name == "target_digest" and (first is None or other is None)
            if first != other and not is_unknown:
                raise ConfigError(
                    f"{directories[0]} has {name} = {first!r} and {directory} {other!r}; "
                    "train on directories made alike"
                )
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise ConfigError("a data directory is given twice; name each once")


def _check_target(
    found: Sequence[dict[str, Any]], shards: Sequence[Shard], num_taps: int, model_path: Path
) -> None:
    wanted = (num_taps, TargetShape.load(model_path).hidden_size)
    for shard in shards:
        if shard.tap_shape != wanted:
            raise ConfigError(
                f"{shard.path} holds tap rows {shard.tap_shape}, and {model_path} has {wanted}; "
                "give --model the target that wrote the data"
            )
    digests = {settings["target_digest"] for settings in found if settings.get("target_digest")}
    if digests and digests != {target_digest(model_path)}:
        raise ConfigError(
            f"the data were written by another model than {model_path}; give --model the one that wrote them"
        )
