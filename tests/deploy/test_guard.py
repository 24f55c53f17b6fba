"""Streams that nobody reads: they end, over gRPC and over HTTP alike."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, MutableMapping
from typing import Any

import pytest

from paceline.cluster.errors import RequestError
from paceline.deploy.api.guard import NUM_AHEAD, ReadAhead
from paceline.deploy.api.streaming import ClientGone, EventStream


async def test_a_stream_that_nobody_reads_is_ended() -> None:
    """The guard alone: over a socket the buffers on the way hide a stopped reader for a while."""
    is_closed = asyncio.Event()

    async def endless() -> AsyncGenerator[int, None]:
        try:
            for number in itertools.count(1):
                yield number
        finally:
            is_closed.set()

    ahead = ReadAhead(endless(), 0.05)
    assert await anext(ahead) == 1
    async with asyncio.timeout(5):
        await is_closed.wait()
    left = [await anext(ahead) for _ in range(NUM_AHEAD)]
    assert left == list(range(2, NUM_AHEAD + 2))
    with pytest.raises(RequestError, match=r"was read for 0\.05 s"):
        await anext(ahead)
    await ahead.aclose()


async def test_events_that_nobody_takes_end_the_stream() -> None:
    """Over HTTP it is the socket that does not take them."""
    is_closed = asyncio.Event()
    taken: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            is_closed.set()

    async def send(message: MutableMapping[str, Any]) -> None:
        if len(taken) == 3:
            await asyncio.Event().wait()
        taken.append(message.get("body", b""))

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(ClientGone, match="nothing was read"):
        await EventStream(events(), 0.05)({}, receive, send)
    assert is_closed.is_set()


async def test_a_slow_reader_who_reads_is_served() -> None:
    async def many() -> AsyncGenerator[int, None]:
        for number in range(3 * NUM_AHEAD):
            yield number

    ahead = ReadAhead(many(), 0.2)
    await asyncio.sleep(0.05)
    got = []
    async for number in ahead:
        got.append(number)
        await asyncio.sleep(0.001)
    assert got == list(range(3 * NUM_AHEAD))
