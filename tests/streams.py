"""Requests for a tiny model, and streams of an engine read to their end."""

import asyncio
import random
import time

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.cluster.messages import SamplingParams, Stats
from paceline.deploy.engine import Engine

Request = tuple[list[int], SamplingParams]


def tiny_config(**engine: object) -> Config:
    """float32, one thread, little K/V memory, always drafting, and every invariant checked at every event."""
    settings = {
        "num_threads": 1,
        "kv_cache_gib": 0.01,
        "draft_budget": False,
        "check_invariants": True,
        **engine,
    }
    return Config(
        model=ModelConfig(model="tiny", dtype="float32"),
        engine=EngineConfig(**settings),  # pyright: ignore[reportArgumentType]
    )


def requests(count: int, max_tokens: int) -> list[Request]:
    """Prompts of many lengths, half greedy, half sampled."""
    numbers = random.Random(7)
    return [
        (
            [numbers.randrange(3, 512) for _ in range(numbers.randrange(1, 90))],
            SamplingParams(max_tokens=max_tokens, temperature=float(index % 2), seed=index),
        )
        for index in range(count)
    ]


async def collect(engine: Engine, name: str, request: Request) -> list[int]:
    token_ids: list[int] = []
    async for output in engine.stream(name, *request):
        assert output.first_index == len(token_ids)
        token_ids += output.token_ids
    return token_ids


async def together(engine: Engine, wanted: list[Request], name: str = "r") -> list[list[int]]:
    return await asyncio.gather(
        *(collect(engine, f"{name}{index}", request) for index, request in enumerate(wanted))
    )


async def wait_idle(engine: Engine) -> None:
    """Until a report from now or later says that all pages, those of the shards too, are free."""
    asked_at = time.monotonic()

    def is_idle(stats: Stats) -> bool:
        pools = [stats, *stats.shards]
        return not stats.has_work and all(pool.num_free_pages == pool.num_pages for pool in pools)

    async with asyncio.timeout(10.0):
        while engine._stats_at <= asked_at or not is_idle(engine.stats):
            await asyncio.sleep(0.05)


async def wait_until_all_emit(engine: Engine, num_tokens: int) -> None:
    """Until every open stream has at least so many tokens."""
    async with asyncio.timeout(60.0):
        while min((len(j.emitted_ids) for j in engine._journals.values()), default=0) < num_tokens:
            await asyncio.sleep(0.001)
