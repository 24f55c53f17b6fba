"""A stand-in for the scheduler, for tests of the ranks: it admits, chunks and decodes, and no more."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import Admit, Chunk, Decision, PromptScores, SamplingParams, StepPlan
from paceline.workers.collectives import Collectives, connect
from paceline.workers.runner import Runner


def make_config(**options: Any) -> Config:
    """float32, one thread, little K/V memory."""
    model_options = {"dtype": options.pop("dtype", "float32"), "max_model_len": options.pop("max_len", 256)}
    backend = os.environ.get("PACELINE_BACKEND", "auto")
    defaults = {"num_threads": 1, "kv_cache_gib": 0.05, "backend": backend}
    return Config(model=ModelConfig(**model_options), engine=EngineConfig(**(defaults | options)))


@dataclass
class Stream:
    """One request as the driver follows it."""

    sequence_id: int
    tokens: list[int]  # prompt and output
    prompt_len: int
    params: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    decisions: list[Decision] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def is_done(self) -> bool:
        return len(self.output) >= self.params.max_tokens


class Driver:
    """Plays the scheduler to one group of ranks; pages are never reused before `release`."""

    def __init__(self, *runners: Runner) -> None:
        self.runners = runners
        self.page_size = 16
        self.scores: list[PromptScores] = []  # of all steps
        self._step = 0
        self._num_sequences = 0
        self._free_pages = list(range(min(runner.num_pages for runner in runners)))[::-1]

    def admit(self, prompt: Sequence[int], params: SamplingParams) -> Stream:
        stream = Stream(self._num_sequences, list(prompt), len(prompt), params)
        self._num_sequences += 1
        self.step(admit=[Admit(stream.sequence_id, stream.tokens.copy(), stream.prompt_len, params)])
        return stream

    def release(self, stream: Stream) -> None:
        self.step(release=[stream.sequence_id])
        self._free_pages += stream.pages[::-1]

    def step(self, **parts: Any) -> list[Decision]:
        """Send one plan to every rank, each on a thread, as its process would."""
        self._step += 1
        plan = StepPlan(step=self._step, **parts)
        results = (
            [self.runners[0].execute(plan)]
            if len(self.runners) == 1
            else on_threads([lambda r=runner: r.execute(plan) for runner in self.runners])
        )
        assert not any(result.decisions or result.scores for result in results[1:])
        self.scores += results[0].scores
        return results[0].decisions

    def chunk(self, stream: Stream, num_rows: int, drafts: Sequence[int] = ()) -> Chunk:
        """The next rows of a stream; with drafts, its anchor and those."""
        is_decode = stream.computed == len(stream.tokens) - 1 and bool(stream.output)
        if is_decode:
            tail, num_rows = [stream.tokens[-1], *drafts], 1 + len(drafts)
        else:
            tail, num_rows = [], min(num_rows, len(stream.tokens) - stream.computed)
        end = stream.computed + num_rows
        num_new = -(-end // self.page_size) - len(stream.pages)
        new_pages = [self._free_pages.pop() for _ in range(num_new)]
        stream.pages += new_pages
        num_decided = num_rows if is_decode else int(end == len(stream.tokens))
        return Chunk(stream.sequence_id, stream.computed, num_rows, tail, new_pages, num_decided)

    def advance(self, streams: Sequence[Stream], num_rows: int | Callable[[Stream], int] = 64) -> None:
        """One step over the unfinished streams: up to `num_rows` of prompt each, or one decode row."""
        running = [stream for stream in streams if not stream.is_done]
        rows = [num_rows if isinstance(num_rows, int) else num_rows(stream) for stream in running]
        chunks = [self.chunk(stream, n) for stream, n in zip(running, rows, strict=True)]
        decisions = {d.sequence_id: d for d in self.step(chunks=chunks)}
        for stream, chunk in zip(running, chunks, strict=True):
            stream.computed += chunk.num_rows
            if decision := decisions.get(stream.sequence_id):
                stream.tokens += decision.token_ids
                stream.decisions.append(decision)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Stream]:
        """Run all prompts together to their max_tokens."""
        many = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        streams = [self.admit(prompt, p) for prompt, p in zip(prompts, many, strict=True)]
        while any(not stream.is_done for stream in streams):
            self.advance(streams)
        for stream in streams:
            self.release(stream)
        return streams


def on_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the calls at once; their results in order, or the first error."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors := [result for result in results if isinstance(result, Exception)]:
        raise errors[0]
    return results


def join_group(size: int, **options: Any) -> list[Collectives]:
    """`size` ends of shared memory in this process; each needs a thread of its own to collect."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # pyright: ignore[reportPrivateImportUsage]

    def join(rank: int) -> Collectives:
        # A store's connection serves one call at a time, and rank 1 waits in it for what rank 0 writes.
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        return connect("shared-memory", rank=rank, size=size, store=own, **options)

    return on_threads([lambda rank=rank: join(rank) for rank in range(size)])


def start_group(path: Path, config: Config, size: int) -> list[Runner]:
    """`size` ranks over shared memory, each on a thread of this process."""
    if size == 1:
        return [Runner(path, config)]
    ranks = join_group(size, timeout_s=30.0)
    cpu = torch.device("cpu")
    return on_threads([lambda rank=rank: Runner(path, config, rank, device=cpu) for rank in ranks])
