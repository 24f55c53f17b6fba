"""A stream made ahead of its reader: it can be stopped from outside, and ends when nobody reads it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

from ...cluster.errors import RequestError

Item = TypeVar("Item")

NUM_AHEAD = 64  # items made ahead of a reader


def abandoned(patience_s: float) -> RequestError:
    return RequestError(
        f"nothing of this stream was read for {patience_s:g} s; read faster, or cancel what is not wanted",
        status=408,
        code="stream_abandoned",
        error_type="timeout_error",
    )


class ReadAhead(Generic[Item]):
    """An async iterator over `items`, which a task of its own draws.

    When NUM_AHEAD items lie unread and none is taken for `patience_s`, or at `stop`, the task closes `items`;
    whoever reads then gets what was made before, and the error. Belongs to one event loop; `aclose` it.
    """

    def __init__(self, items: AsyncGenerator[Item, None], patience_s: float | None) -> None:
        self._patience_s = patience_s
        self._unread: deque[Item] = deque()
        self._has_news = asyncio.Event()  # an item, or the end
        self._has_room = asyncio.Event()
        self._error: Exception | None = None
        self._is_done = False
        self._drawing = asyncio.create_task(self._draw(items))

    def stop(self, error: Exception) -> None:
        """End the stream with `error` unless it has ended."""
        if not self._is_done:
            self._error = self._error or error
            self._drawing.cancel()

    def __aiter__(self) -> "ReadAhead[Item]":
        return self

    async def __anext__(self) -> Item:
        while not self._unread:
            if self._is_done:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        self._has_room.set()
        return self._unread.popleft()

    async def aclose(self) -> None:
        """Returns when `items` is closed."""
        self._drawing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._drawing

    async def _draw(self, items: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(items):
                async for item in items:
                    self._unread.append(item)
                    self._has_news.set()
                    while len(self._unread) >= NUM_AHEAD:
                        await self._wait_for_reader()
        except Exception as error:  # whatever it is, it is the reader's to see
            self._error = self._error or error
        finally:
            self._is_done = True
            self._has_news.set()

    async def _wait_for_reader(self) -> None:
        self._has_room.clear()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._has_room.wait()
        except TimeoutError:
            assert self._patience_s is not None
            raise abandoned(self._patience_s) from None
