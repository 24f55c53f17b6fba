"""A tiny target with a tokenizer and a chat template, and training data made by it, for tests."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from front import byte_level, loaded
from tiny import make_checkpoint

from paceline.deploy.api.text import Tokenizer
from paceline.deploy.training.writer import TargetWriter
from paceline.drafter.training.data import DataProgress, DataSettings, make_data
from paceline.drafter.training.shape import target_digest

TAP_LAYER_IDS = (0, 1)
LAST_LAYER_ID = 2
CPU = torch.device("cpu")


def make_target(path: Path) -> Path:
    """A random llama of three layers and 512 tokens; the tokenizer has a special one to spare."""
    make_checkpoint(path, "llama")
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<|mask|>"])
    loaded(tokenizer, path)
    return path


def write_chats(path: Path, count: int) -> Path:
    """A JSON lines file of different short questions."""
    lines = [{"messages": [{"role": "user", "content": f"what is {n}, fox {n * n}?"}]} for n in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_writer(
    target: Path,
    *,
    num_places: int = 8,
    max_len: int = 96,
    tap_layer_ids: tuple[int, ...] = TAP_LAYER_IDS,
) -> TargetWriter:
    torch.set_num_threads(1)
    return TargetWriter(
        target,
        num_places=num_places,
        max_len=max_len,
        tap_layer_ids=tap_layer_ids,
        tap_dtype=torch.float32,
        dtype=torch.float32,
        device=CPU,
    )


def settings_of(**changes: object) -> DataSettings:
    """Small rounds of short answers."""
    values: dict[str, object] = {
        "tap_layer_ids": TAP_LAYER_IDS,
        "tap_dtype": "float32",
        "round_len": 12,
        "shard_len": 4,
        "max_prompt_len": 64,
        "max_answer_len": 24,
        "heldout_share": 0.25,
    }
    return DataSettings(**{**values, **changes})  # pyright: ignore[reportArgumentType]


def fill(directory: Path, target: Path, settings: DataSettings, num_tokens: int) -> list[DataProgress]:
    """Make data of a tiny target; returns what was reported."""
    settings = replace(settings, target_digest=target_digest(target))
    tapped = settings.tap_layer_ids + ((LAST_LAYER_ID,) if settings.keeps_last else ())
    reports: list[DataProgress] = []
    make_data(
        directory,
        make_writer(target, max_len=settings.max_len, tap_layer_ids=tapped),
        Tokenizer.load(target),
        settings,
        num_tokens,
        reports.append,
    )
    return reports
