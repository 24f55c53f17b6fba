"""Load: 500 requests over HTTP, 32 at a time, many of whose clients leave; over Ray, with a shard."""

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from front import listening
from streams import wait_idle

from paceline.cluster.config import Config, EngineConfig, ModelConfig
from paceline.deploy.api.front import front_of
from paceline.deploy.assemble import start_engine

NUM_REQUESTS = 500
NUM_CLIENTS = 32
MOST_TOKENS = 10
MODEL = "SmolLM2-135M-Instruct"
WORDS = [
    "the",
    "sea",
    "rose",
    "over",
    "old",
    "walls",
    "and",
    "every",
    "lamp",
    "went",
    "out",
    "before",
    "dawn",
]

pytestmark = [pytest.mark.usefixtures("ray_local"), pytest.mark.timeout(600)]


def bodies() -> Iterator[tuple[dict[str, Any], int | None]]:
    """Requests, and after how many chunks their clients leave: 0 is before the first byte, None never."""
    numbers = random.Random(5)
    for index in range(NUM_REQUESTS):
        words = numbers.choices(WORDS, k=numbers.randrange(2, 14))
        body = {
            "model": MODEL,
            "prompt": " ".join(words),
            "max_tokens": numbers.randrange(1, MOST_TOKENS + 1),
            "temperature": numbers.choice([0, 1]),
            "seed": index,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield body, numbers.choice([None, None, 0, 1, 1 + numbers.randrange(MOST_TOKENS)])


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leaves_after: int | None) -> str:
    """What became of one request: complete, or left by its client."""
    if leaves_after == 0:
        sending = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 100}))
        await asyncio.sleep(random.Random(body["seed"]).uniform(0.0, 0.1))
        if not sending.done():
            sending.cancel()
            return "left before the first byte"
    num_chunks = 0
    usage: dict[str, int] | None = None
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if num_chunks == leaves_after:
                return "left in the middle"
            if line.startswith("data: {"):
                num_chunks += 1
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
            is_done = line == "data: [DONE]"
            if is_done:
                break
    assert usage is not None, "a stream ended without its usage"
    assert usage["completion_tokens"] == body["max_tokens"]
    return "complete"


async def test_500_requests_and_many_that_leave(default_model: Path) -> None:
    """Whoever stays gets every token; all pages come back, and no process is left behind."""
    config = Config(
        model=ModelConfig(dtype="float32", max_model_len=256, served_model_name=MODEL),
        engine=EngineConfig(
            num_threads=1, kv_cache_gib=0.2, max_num_seqs=NUM_CLIENTS, check_invariants=True, drafter="ngram"
        ),
    )
    engine = await start_engine(config, default_model)
    front = front_of(config, default_model, engine, "0")
    waiting = list(bodies())
    became: Counter[str] = Counter()

    async def client_of(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
            while waiting:
                became[await ask(client, *waiting.pop())] += 1

    try:
        with listening(front) as url:
            assert len(_engine_processes()) == 3, "a scheduler, a rank, a shard"
            await asyncio.gather(*(client_of(url) for _ in range(NUM_CLIENTS)))
            await wait_idle(engine)
        assert sum(became.values()) == NUM_REQUESTS
        assert len(became) == 3, became
        assert min(became.values()) > 50, became
        assert engine.num_streams == 0
        assert engine.num_rebuilds == 0
        assert engine.stats.num_drafts > 0
        engine.check_health()
    finally:
        await engine.close()
    deadline = time.monotonic() + 10
    while left := _engine_processes():
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.1)


def _engine_processes() -> list[str]:
    """The actors of engines among the processes that this one started, by the titles Ray gives them."""
    titles: list[str] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            titles += process.cmdline()[:1]
    kinds = ("SchedulerActor", "WorkerActor", "DrafterActor")
    return [title for title in titles if title.startswith(tuple(f"ray::{kind}" for kind in kinds))]
