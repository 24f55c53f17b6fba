"""How requests are sent: a closed loop keeps so many in flight, an open one sends whatever happens."""

import asyncio
import random
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import msgspec

from .client import Asked, Client, Query, Stream


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the two."""

    concurrency: int = 0  # requests in flight, of a closed loop
    rate: float = 0.0  # requests per second, of an open loop

    @property
    def name(self) -> str:
        return f"{self.concurrency} streams" if self.concurrency else f"{self.rate:g}/s"

    async def run(
        self, client: Client, queries: Sequence[Query], asked: Asked, seed: int = 0
    ) -> tuple[list[Stream], float]:
        """Send all queries; the streams and the wall time. Raises BenchError when one is refused."""
        if self.concurrency:
            return await closed_loop(client, queries, asked, self.concurrency)
        return await open_loop(client, queries, asked, self.rate, seed)


async def closed_loop(
    client: Client, queries: Sequence[Query], asked: Asked, concurrency: int
) -> tuple[list[Stream], float]:
    """Keep `concurrency` requests in flight until every query is answered; the streams and the wall time."""
    streams: list[Stream] = []
    waiting = iter(queries)

    async def one_after_another() -> None:
        for query in waiting:
            stream = await client.stream(query, asked)
            streams.append(stream)

    started = time.perf_counter()
    await _together(one_after_another() for _ in range(concurrency))
    return streams, time.perf_counter() - started


async def open_loop(
    client: Client, queries: Sequence[Query], asked: Asked, rate: float, seed: int
) -> tuple[list[Stream], float]:
    """Send queries as a Poisson process of `rate` per second, however many are in flight by then.

    The same seed gives the same moments. A request is timed from the moment it was due, so that a client that
    lags behind does not flatter the server.
    """
    chooser = random.Random(seed)
    streams: list[Stream] = []
    started = time.perf_counter()

    async def at(due: float, query: Query) -> None:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        stream = await client.stream(query, asked)
        streams.append(Stream(sent_at=due, query=query, arrivals=stream.arrivals))

    due = started
    coroutines: list[Coroutine[Any, Any, None]] = []
    for query in queries:
        coroutines.append(at(due, query))
        due += chooser.expovariate(rate)
    await _together(coroutines)
    return streams, time.perf_counter() - started


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all at once; the first error ends the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
