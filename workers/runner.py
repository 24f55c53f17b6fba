"""One rank: executes the scheduler's plans, in order, and decides nothing by itself."""

import os
import time
from pathlib import Path

import torch
from torch import Tensor

from ..cluster.config import Config
from ..cluster.errors import ConfigError, ProtocolError
from ..cluster.messages import Admit, Chunk, Decision, PromptScores, SamplingParams, StepPlan, StepResult
from ..cluster.topology import threads_per_rank
from ..kernels.backend import choose_backend
from ..kernels.dtypes import DTYPES, compute_dtype
from ..kernels.grammar import Grammars
from .batch import Batch, build_batch
from .calibration import time_steps
from .collectives import Collectives, Solo
from .kv_cache import KvCache, budget_bytes, count_pages, page_bytes
from .layers import Partition
from .model import Decoder
from .sampler import Sampler
from .sequences import Sequences
from .spec import ModelSpec
from .taps import TapScratch, tap_shape

_WARM_UP_ROWS = 64  # on CPU: enough for the libraries to set up their kernels


class Runner:
    """The model, its K/V, and the sequences of one rank.

    Loads on construction: ModelError for what cannot be loaded, ConfigError for what does not fit. Not
    thread-safe. `num_pages` may differ between ranks by free memory; the scheduler uses the least.
    """

    def __init__(
        self,
        model_path: Path,
        config: Config,
        collectives: Collectives | None = None,
        *,
        device: torch.device | None = None,
        tap_layer_ids: tuple[int, ...] = (),
        tap_buffer: Tensor | None = None,
    ) -> None:
        """Each step leaves the residual stream after `tap_layer_ids` in `tap_buffer`, or one of its own."""
        engine = config.engine
        self._collectives: Collectives = collectives if collectives is not None else Solo()
        self.rank = self._collectives.rank
        self.device = choose_device(engine.device, self.rank) if device is None else device
        if self.device.type == "cpu":
            num_cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(threads_per_rank(num_cores, self._collectives.size, engine.num_threads))
        dtype = compute_dtype(config.model.dtype, self.device, engine.backend)
        self.spec = ModelSpec.load(model_path)
        self.max_model_len = max_model_len(self.spec, config.model.max_model_len)
        partition = Partition(self.spec, self.rank, self._collectives.size)
        self._max_num_rows = engine.max_num_batched_tokens
        self._page_size = engine.page_size
        self._taps = None
        if tap_layer_ids:
            if tap_buffer is None:
                shape = tap_buffer_shape(tap_layer_ids, self.spec, config)
                tap_buffer = torch.zeros(shape, dtype=dtype, device=self.device)
            self._taps = TapScratch(tap_layer_ids, tap_buffer)
        backend = choose_backend(self.device, engine.backend)
        page_dtype = backend.page_dtype(DTYPES[config.model.dtype], dtype)
        one_page_bytes = page_bytes(partition, engine.page_size, page_dtype)
        if self.device.type == "cpu":  # known before the weights are read: refuse early
            self.num_pages = self._count_pages(config, one_page_bytes)
        self._model = Decoder(
            model_path,
            partition,
            backend,
            self._collectives,
            max_len=self.max_model_len,
            dtype=dtype,
            device=self.device,
        )
        self._sampler = Sampler(partition, self._collectives)
        self.grammars = Grammars(model_path, self.spec.vocab_size, self.spec.eos_token_ids)
        self._sequences = Sequences(self.max_model_len, engine.page_size, self.grammars)
        num_warm_rows = min(self._max_num_rows, self.max_model_len)
        if self.device.type == "cpu":
            num_warm_rows = min(num_warm_rows, _WARM_UP_ROWS)
        num_warm_pages = -(-num_warm_rows // engine.page_size)
        self._kv_cache = KvCache(partition, num_warm_pages, engine.page_size, page_dtype, self.device)
        self.step_costs = self._warm_up(num_warm_rows, num_warm_pages, measures=engine.needs_step_costs)
        if self.device.type != "cpu":
            self.num_pages = self._count_pages(config, one_page_bytes)
        self._kv_cache = KvCache(partition, self.num_pages, engine.page_size, page_dtype, self.device)
        self._last_step = 0

    @property
    def tap_buffer(self) -> Tensor | None:
        """[max_num_batched_tokens, num_taps, hidden] of the last step, if blocks are tapped."""
        return self._taps.buffer if self._taps is not None else None

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply a plan: release, admit, run the chunks. Decisions are filled in on rank 0 only.

        Raises ProtocolError for a plan out of order or one that contradicts what this rank holds.
        """
        began = time.perf_counter()
        if plan.step != self._last_step + 1:
            raise ProtocolError(f"rank {self.rank} expected step {self._last_step + 1}, got {plan.step}")
        self._last_step = plan.step
        for sequence_id in plan.release:
            self._sequences.release(sequence_id)
        for admit in plan.admit:
            self._sequences.admit(admit)
        decisions, scores = self._run(plan.chunks) if plan.chunks else ([], [])
        if self._taps is not None:
            self._taps.publish()
        return StepResult(
            step=plan.step, decisions=decisions, scores=scores, compute_s=time.perf_counter() - began
        )

    def logits(self, chunks: list[Chunk]) -> Tensor:
        """[R, num_ids] float32, this rank's part, of the deciding rows of chunks of admitted sequences."""
        batch, logits = self._forward(chunks)
        return logits[: batch.num_decided]

    def _run(self, chunks: list[Chunk]) -> tuple[list[Decision], list[PromptScores]]:
        batch, logits = self._forward(chunks)
        scores = self._sampler.score(batch.scorers, logits[batch.num_decided :]) if batch.scorers else []
        if batch.num_decided == 0:
            return [], scores
        return self._sampler.decide(chunks, batch.deciders, logits[: batch.num_decided]), scores

    def _forward(self, chunks: list[Chunk]) -> tuple[Batch, Tensor]:
        sequences = [self._sequences.extend(chunk) for chunk in chunks]
        batch = build_batch(chunks, sequences, self._page_size, self.device)
        if len(batch.token_ids) > self._max_num_rows:
            raise ProtocolError(f"a plan of {len(batch.token_ids)} rows exceeds {self._max_num_rows}")
        states = self._model.forward(batch.token_ids, batch.rows, self._kv_cache, self._taps, batch.decided)
        return batch, self._model.logits(states)

    def _warm_up(self, num_rows: int, num_pages: int, *, measures: bool) -> list[tuple[int, float]]:
        """Run steps nobody asked for: libraries choose their kernels, and memory reaches its peak.

        If wanted, time some that decide every row: (rows, milliseconds).
        """
        params = SamplingParams(max_tokens=1)
        self._sequences.admit(Admit(0, [0] * num_rows, num_rows, params))
        self._run([Chunk(0, 0, num_rows, [], list(range(num_pages)), 1)])
        self._run([Chunk(0, num_rows - 1, 1, [], [], 1)])
        step_costs = time_steps(self._run, num_rows) if measures else []
        self._sequences.release(0)
        return step_costs

    def _count_pages(self, config: Config, one_page_bytes: int) -> int:
        engine = config.engine
        budget = budget_bytes(
            engine.kv_cache_gib, self._collectives.size, engine.gpu_memory_utilization, self.device
        )
        return count_pages(budget, one_page_bytes, engine.page_size, self.max_model_len)


def choose_device(configured: str, rank: int) -> torch.device:
    """The device of a rank. Ray shows each worker its own GPU only, which is then number 0."""
    has_cuda = torch.cuda.is_available()
    if configured == "cuda" and not has_cuda:
        raise ConfigError(
            "device is cuda, but torch sees no GPU; install a CUDA build of torch or choose cpu"
        )
    if configured == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def max_model_len(spec: ModelSpec, configured: int | None) -> int:
    """Tokens per sequence; ConfigError when configured above what the model was made for."""
    if configured is not None and configured > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {configured} is above the model's {spec.max_model_len}; lower it or leave it out"
        )
    return configured or spec.max_model_len


def tap_buffer_shape(tap_layer_ids: tuple[int, ...], spec: ModelSpec, config: Config) -> tuple[int, int, int]:
    """[rows of a step, taps, hidden]; ConfigError for a block that the model does not have."""
    return tap_shape(
        tap_layer_ids,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        max_num_rows=config.engine.max_num_batched_tokens,
    )
