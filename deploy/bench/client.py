"""A client that measures: it sends requests to an OpenAI server and keeps when each event of a stream came.

Nothing is parsed while the clock runs: a stream keeps the arrival time and the bytes of each event, and is
read when its load has ended.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from ...cluster.errors import PacelineError


class BenchError(PacelineError):
    """A server that did not do the work that was to be measured."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: str
    content: str


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request says: a prompt to continue (text or token ids) or messages to answer, not both."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    max_tokens: int | None = None  # None: what everybody is asked for

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of `prompt` and `messages` is needed")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a load have in common."""

    max_tokens: int
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int | None = None

    def tokens_of(self, query: Query) -> int:
        return self.max_tokens if query.max_tokens is None else query.max_tokens


@dataclass(frozen=True, slots=True)
class Stream:
    """What one request got: the clock when it was sent, and every event with its arrival."""

    sent_at: float
    query: Query | None = None
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's output tokens, as times since it was sent, one per event that carried any."""

    num_tokens: int
    times_s: list[float]
    prompt_len: int = 0


@dataclass(frozen=True, slots=True)
class Client:
    """Speaks to one server about one model."""

    session: aiohttp.ClientSession
    model: str

    async def stream(self, query: Query, asked: Asked) -> Stream:
        """Send one request and read it to its end. Raises BenchError when it is refused."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": asked.tokens_of(query),
            "temperature": asked.temperature,
            "ignore_eos": asked.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asked.seed is not None:
            body["seed"] = asked.seed
        if query.messages is None:
            path, body["prompt"] = "/v1/completions", query.prompt
        else:
            path, body["messages"] = "/v1/chat/completions", msgspec.to_builtins(query.messages)
        stream = Stream(sent_at=time.perf_counter(), query=query)
        async with self.session.post(path, json=body) as response:
            if response.status != 200:
                raise BenchError(f"a request was answered {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data:"):
                    stream.arrivals.append((time.perf_counter(), line[5:].strip()))
        return stream

    async def metrics(self) -> str | None:
        """The text of `/metrics`, or None where there is none."""
        async with self.session.get("/metrics") as response:
            return await response.text() if response.status == 200 else None


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client of the server at `url`, for its first model. Raises BenchError for what goes wrong on the way.

    A stream that stalls for two minutes has failed.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    # Some servers close each connection without saying so: none is used twice, with any of them.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            async with session.get("/v1/models") as response:
                if response.status != 200:
                    raise BenchError(f"GET /v1/models was answered {response.status}")
                model = (await response.json())["data"][0]["id"]
            yield Client(session, model)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{url}: {type(error).__name__}: {error}") from error


class _Usage(msgspec.Struct):
    completion_tokens: int
    prompt_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None

    @property
    def has_spoken(self) -> bool:
        """Whether it may carry tokens: a chat's first event names the role only."""
        return self.delta is None or bool(self.delta.content)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


def read_stream(stream: Stream, num_new_tokens: int | None) -> Timing:
    """Turn raw events into times.

    Raises BenchError on an error event, a torn stream, or another length than asked (None: any but none).
    """
    times_s: list[float] = []
    num_tokens = prompt_len = 0
    is_done = False
    for arrival, payload in stream.arrivals:
        if payload == b"[DONE]":
            is_done = True
            continue
        event = msgspec.json.decode(payload, type=_Event)
        if event.error is not None:
            raise BenchError(f"the server ended a stream with {payload.decode(errors='replace')[:300]}")
        if any(choice.has_spoken for choice in event.choices):
            times_s.append(arrival - stream.sent_at)
        if event.usage is not None:
            num_tokens, prompt_len = event.usage.completion_tokens, event.usage.prompt_tokens
    if not is_done:
        raise BenchError("a stream ended without [DONE]")
    if num_new_tokens not in (None, num_tokens) or not times_s:
        wanted = "at least one" if num_new_tokens is None else num_new_tokens
        raise BenchError(f"a stream carried {num_tokens} tokens in {len(times_s)} events, not {wanted}")
    return Timing(num_tokens=num_tokens, times_s=times_s, prompt_len=prompt_len)
