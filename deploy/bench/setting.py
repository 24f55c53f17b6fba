"""What is asked of every peer alike: closed loops of fresh prompts at several concurrencies.

Every prompt is a list of token ids and no two prompts of one server life are equal, so all servers read the
same ids and a prefix cache cannot help.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ...cluster.config_json import ConfigJson
from .client import Asked, Query, Stream, connected, read_stream
from .counters import read_step_counters
from .load import Load
from .measure import Measurement, summarise

_WARM_UP_TOKENS = 4


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What every request asks for. Greedy, end-of-sequence ignored."""

    prompt_len: int = 128
    num_new_tokens: int = 128
    is_chat: bool = False  # prompts are a user's turn, not bare text


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of every server alike."""

    model_path: str
    dtype: str
    workload: Workload
    concurrencies: tuple[int, ...]
    prompts: list[list[int]]  # used up in order, by warm-up and measurement
    drafter_path: str | None = None  # of the peers that draft with a checkpoint
    num_drafts: int = 0  # that it was trained for


def trained_drafts(drafter_path: Path) -> int:
    """Drafts of a block: all but its anchor. Raises ModelError for what is no drafter."""
    return ConfigJson.read(drafter_path / "config.json").integer("block_size") - 1


def num_requests_at(concurrency: int) -> int:
    """Two full waves, and at least four requests, so that a median means something."""
    return max(4, 2 * concurrency)


def num_prompts_for(concurrencies: Sequence[int]) -> int:
    """How many prompts one server's life uses up."""
    return sum(concurrency + num_requests_at(concurrency) for concurrency in concurrencies)


def take(prompts: Iterator[list[int]], count: int) -> list[list[int]]:
    """The next `count` prompts."""
    return [next(prompts) for _ in range(count)]


async def measure_server(url: str, setting: Setting) -> list[Measurement]:
    """Warm the server up at every concurrency, then measure each; takes a fresh prompt for every request.

    Raises BenchError when a request fails, is shorter than asked, or stalls for two minutes.
    """
    prompts = iter(setting.prompts)
    num_new_tokens = setting.workload.num_new_tokens
    measurements: list[Measurement] = []
    async with connected(url) as client:

        async def run(load: Load, num_requests: int, max_tokens: int) -> tuple[list[Stream], float]:
            queries = [Query(prompt=prompt) for prompt in take(prompts, num_requests)]
            return await load.run(client, queries, Asked(max_tokens=max_tokens))

        loads = [Load(concurrency=concurrency) for concurrency in setting.concurrencies]
        for load in loads:
            await run(load, load.concurrency, _WARM_UP_TOKENS)
        for load in loads:
            before = await read_step_counters(client)
            streams, wall_s = await run(load, num_requests_at(load.concurrency), num_new_tokens)
            after = await read_step_counters(client)
            timings = [read_stream(stream, num_new_tokens) for stream in streams]
            counters = after.since(before) if before and after else None
            measurements.append(summarise(timings, load, wall_s, counters))
    return measurements
