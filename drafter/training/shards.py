"""Sequences and their tap rows on disk: one safetensors file per shard, written once, read memory-mapped.

    token_ids    int32 [T]        the sequences one behind the other
    offsets      int64 [S + 1]    where each begins
    prompt_lens  int32 [S]
    prompt_ids   int64 [S]        which prompt of the round each answers
    temperatures float32 [S]
    taps         [T, taps, H]     row t belongs to token t; that of a sequence's last token is zero: it was
                                  never computed, and nothing may read it
    last         [T, H]           likewise, the state behind the target's last block; in data that keep it

A file appears under its name only when it is whole: it is written beside and renamed.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...cluster.errors import ConfigError
from .writing import Written

_NAMES = ("token_ids", "offsets", "prompt_lens", "prompt_ids", "temperatures", "taps")


@dataclass(frozen=True, slots=True)
class Example:
    """One recorded sequence of L tokens."""

    token_ids: Tensor  # int64 [L]
    prompt_len: int
    temperature: float
    taps: Tensor  # [L, taps, H], mapped; the last row is no tap row
    last: Tensor | None = None  # [L, H] behind the last block, if it was kept; mapped

    @property
    def answer_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


class Shard:
    """One file's sequences; tensors stay in the mapped file until they are read."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                parts = {name: file.get_tensor(name) for name in _NAMES}
                self._last = file.get_tensor("last") if "last" in file.keys() else None  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} is no shard ({error}); delete it and make it again") from None
        self.path = path
        self._token_ids, self._taps = parts["token_ids"], parts["taps"]
        self._offsets: list[int] = parts["offsets"].tolist()
        self._prompt_lens: list[int] = parts["prompt_lens"].tolist()
        self._temperatures: list[float] = parts["temperatures"].tolist()

    def __len__(self) -> int:
        return len(self._prompt_lens)

    def __getitem__(self, index: int) -> Example:
        rows = slice(self._offsets[index], self._offsets[index + 1])
        return Example(
            self._token_ids[rows].long(),
            self._prompt_lens[index],
            self._temperatures[index],
            self._taps[rows],
            None if self._last is None else self._last[rows],
        )

    @property
    def has_last(self) -> bool:
        return self._last is not None

    @property
    def lens(self) -> list[int]:
        """Tokens of every sequence."""
        return [end - begin for begin, end in pairwise(self._offsets)]

    @property
    def answer_lens(self) -> list[int]:
        return [length - prompt for length, prompt in zip(self.lens, self._prompt_lens, strict=True)]

    @property
    def num_answer_tokens(self) -> int:
        return self._offsets[-1] - sum(self._prompt_lens)

    @property
    def tap_shape(self) -> tuple[int, int]:
        """(taps, H)."""
        _, num_taps, hidden_size = self._taps.shape
        return num_taps, hidden_size

    def prompts(self) -> Iterator[Tensor]:
        """Token ids of every prompt."""
        for begin, prompt_len in zip(self._offsets, self._prompt_lens, strict=False):
            yield self._token_ids[begin : begin + prompt_len]

    def answer(self, index: int) -> Tensor:
        """Its token ids."""
        return self._token_ids[self._offsets[index] + self._prompt_lens[index] : self._offsets[index + 1]]


def write_shard(
    path: Path,
    sequences: Sequence[Written],
    prompt_ids: Sequence[int],
    temperatures: Sequence[float],
    *,
    with_last: bool = False,
) -> None:
    """Store sequences with their tap rows, of which the last is not the drafter's `with_last`.

    Raises ConfigError when a row does not fit the rows' dtype.
    """
    taps: list[Tensor] = []
    for sequence in sequences:
        assert sequence.taps is not None
        taps += [sequence.taps, torch.zeros_like(sequence.taps[:1])]
    rows = torch.cat(taps)
    if not bool(rows.isfinite().all()):
        raise ConfigError(
            f"tap rows of this model do not fit {rows.dtype}; start anew with --tap-dtype bfloat16"
        )
    lens = torch.tensor([0, *(len(sequence.token_ids) for sequence in sequences)])
    tensors = {
        "token_ids": torch.tensor(
            [token_id for sequence in sequences for token_id in sequence.token_ids], dtype=torch.int32
        ),
        "offsets": lens.cumsum(0),
        "prompt_lens": torch.tensor([sequence.prompt_len for sequence in sequences], dtype=torch.int32),
        "prompt_ids": torch.tensor(prompt_ids),
        "temperatures": torch.tensor(temperatures, dtype=torch.float32),
        "taps": rows[:, : rows.shape[1] - with_last].contiguous(),
    }
    if with_last:
        tensors["last"] = rows[:, -1].contiguous()
    partial = path.with_name(f"{path.name}.partial")
    save_file(tensors, partial)
    publish(partial, path)


def publish(partial: Path, path: Path) -> None:
    """Give a file that is whole its name, so that it survives whatever comes next."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
