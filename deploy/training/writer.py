"""The target writes: many sequences at once on one device, each place refilled when its sequence ends.

This is `workers.model.Decoder` without a scheduler. Every place owns fixed pages, a step is the rows of all
places that write, and the tap rows of a step are kept as they are computed, so that no second pass over the
text is needed. A token is the keyed draw of the served engine: a sequence depends on its prompt, parameters
and seed, not on what is written beside it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...cluster.errors import ConfigError
from ...drafter.training.writing import Task, Written
from ...kernels import filters, noise, sampling
from ...kernels.backend import choose_backend
from ...kernels.rows import Rows
from ...workers.collectives import Solo
from ...workers.kv_cache import KvCache
from ...workers.layers import Partition
from ...workers.model import Decoder
from ...workers.spec import ModelSpec
from ...workers.taps import TapScratch, tap_shape

PAGE_SIZE = 16
MAX_STEP_ROWS = 2048  # bounds the memory of a step that starts many prompts


class _Place:
    """One sequence being written."""

    def __init__(self, index: int, task: Task) -> None:
        self.index = index
        self.task = task
        self.token_ids = list(task.prompt_ids)
        self.num_computed = 0

    def is_stopped(self) -> bool:
        return self.token_ids[-1] in self.task.stop_ids and len(self.token_ids) > len(self.task.prompt_ids)

    def is_done(self) -> bool:
        return self.is_stopped() or len(self.token_ids) >= len(self.task.prompt_ids) + self.task.max_tokens


class TargetWriter:
    """A target, `num_places` sequences of at most `max_len` tokens, and their tap rows: a `Writer`.

    `tap_dtype` is that of the rows handed out. Raises ModelError for a model that cannot be loaded, and
    ConfigError for a tapped block it does not have. Not thread-safe.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        num_places: int,
        max_len: int,
        tap_layer_ids: tuple[int, ...],
        tap_dtype: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        spec = ModelSpec.load(model_path)
        if max_len > spec.max_model_len:
            raise ConfigError(
                f"a prompt and its answer may have {max_len} tokens, but the model is made for "
                f"{spec.max_model_len}; shorten one of them"
            )
        self.num_places, self.max_len, self.device = num_places, max_len, device
        self.stop_ids = frozenset(spec.eos_token_ids)
        partition = Partition(spec, 0, 1)
        backend = choose_backend(device)
        self._model = Decoder(
            model_path, partition, backend, Solo(), max_len=max_len, dtype=dtype, device=device
        )
        self._num_pages = -(-max_len // PAGE_SIZE)  # of a place
        self._pages = torch.arange(num_places * self._num_pages, device=device).view(num_places, -1)
        self._kv_cache = KvCache(partition, num_places * self._num_pages, PAGE_SIZE, dtype, device)
        self._max_rows = max(MAX_STEP_ROWS, num_places, max_len)
        shape = tap_shape(
            tap_layer_ids,
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
            max_num_rows=self._max_rows,
        )
        self._scratch = TapScratch(tap_layer_ids, torch.zeros(shape, dtype=dtype, device=device))
        self._kept = torch.zeros(num_places, max_len, *shape[1:], dtype=tap_dtype, device=device)

    def write(self, tasks: Iterator[Task], *, with_taps: bool) -> Iterator[Written]:
        """Each task's sequence, in the order in which they end; tasks are started in their own order."""
        places: list[_Place | None] = [None] * self.num_places
        numbered = enumerate(tasks)
        following = next(numbered, None)
        while True:
            num_rows = sum(place is not None for place in places)
            for number, place in enumerate(places):
                if following is None:
                    break
                index, task = following
                assert len(task.prompt_ids) + task.max_tokens <= self.max_len, "a task exceeds max_len"
                if place is None and num_rows + len(task.prompt_ids) <= self._max_rows:
                    places[number] = _Place(index, task)
                    num_rows += len(task.prompt_ids)
                    following = next(numbered, None)
            active = [(number, place) for number, place in enumerate(places) if place is not None]
            if not active:
                return
            for (number, place), token_id in zip(active, self._step(active, with_taps), strict=True):
                place.token_ids.append(token_id)
                if place.is_done():
                    places[number] = None
                    yield self._finish(number, place, with_taps)

    @torch.inference_mode()
    def _step(self, active: list[tuple[int, _Place]], with_taps: bool) -> list[int]:
        """Compute every known token that has no K/V yet; the next token of each sequence."""
        lens = np.array([len(place.token_ids) - place.num_computed for _, place in active])
        ends = np.cumsum(lens)
        context_lens = np.array([len(place.token_ids) for _, place in active])
        numbers = np.array([number for number, _ in active])
        positions = np.arange(ends[-1]) + np.repeat(context_lens - ends, lens)
        token_ids = np.concatenate([place.token_ids[place.num_computed :] for _, place in active])
        of_row = self._tensor(np.repeat(numbers, lens))
        where = self._tensor(positions)
        rows = Rows(
            positions=where,
            slots=self._pages[of_row, where // PAGE_SIZE] * PAGE_SIZE + where % PAGE_SIZE,
            query_lens=lens.tolist(),
            context_lens=context_lens.tolist(),
            page_tables=self._pages[self._tensor(numbers)],
        )
        scratch = self._scratch if with_taps else None
        states = self._model.forward(
            self._tensor(token_ids), rows, self._kv_cache, scratch, self._tensor(ends - 1)
        )
        if with_taps:
            self._kept[of_row, where] = self._scratch.buffer[: len(where)].to(self._kept.dtype)
        for _, place in active:
            place.num_computed = len(place.token_ids)
        return self._draw([place.task for _, place in active], states, context_lens)

    def _draw(self, tasks: list[Task], states: Tensor, positions: np.ndarray) -> list[int]:
        logits = self._model.logits(states)
        filters.apply(logits, tasks)
        temperature = torch.tensor([task.temperature for task in tasks], device=self.device)
        seeds = noise.pack_seeds([task.seed for task in tasks], self.device)
        is_greedy = all(task.temperature == 0 for task in tasks)
        _, ids = sampling.draw(logits, None if is_greedy else temperature, seeds, self._tensor(positions))
        return ids.tolist()

    def _finish(self, number: int, place: _Place, with_taps: bool) -> Written:
        num_rows = len(place.token_ids) - 1
        # A copy: the place is filled again before the caller is done with the rows.
        taps = self._kept[number, :num_rows].to("cpu", copy=True) if with_taps else None
        return Written(place.index, place.token_ids, len(place.task.prompt_ids), place.is_stopped(), taps)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)
