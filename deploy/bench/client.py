"""Measure an OpenAI server as its clients see it: closed loops of streams, and what they add up to.

Every prompt is a list of token ids and no two prompts of one server life are equal, so all servers read the
same ids and a prefix cache cannot help. Nothing is parsed while the clock runs: a stream keeps the arrival
time and the bytes of each event, and is read when its loop has ended.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from ...cluster.errors import PacelineError, UserError

HEARTBEAT_S = 1.5  # the numbers behind /metrics are no older than this


class BenchError(PacelineError):
    """A server that did not do the work that was to be measured."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What every request asks for. Greedy, end-of-sequence ignored."""

    prompt_len: int = 128
    num_new_tokens: int = 128


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of every server alike."""

    model_path: str
    dtype: str
    workload: Workload
    concurrencies: tuple[int, ...]
    prompts: list[list[int]]  # used up in order, by warm-up and measurement


class StepCounters(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's own sums, as `/metrics` shows them: how many steps, and where their seconds went."""

    num_steps: int
    plan_s: float
    wait_s: float
    compute_s: float

    def since(self, earlier: "StepCounters") -> "StepCounters":
        return StepCounters(
            num_steps=self.num_steps - earlier.num_steps,
            plan_s=self.plan_s - earlier.plan_s,
            wait_s=self.wait_s - earlier.wait_s,
            compute_s=self.compute_s - earlier.compute_s,
        )

    @property
    def step_s(self) -> float:
        """Mean length of a step: deciding it, then waiting for its result."""
        return (self.plan_s + self.wait_s) / self.num_steps

    @property
    def overhead_s(self) -> float:
        """Mean seconds of a step in which no rank computed: scheduler, channel, and rank wake-up."""
        return self.step_s - self.compute_s / self.num_steps


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One closed loop at one concurrency. Quantiles are over its requests (gaps: over all their events).

    TTFT is the time to a request's first event, TPOT the mean time per token after it, a gap the time between
    two events.
    """

    concurrency: int
    num_requests: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float
    gap_p99_s: float
    counters: StepCounters | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """What one request got: the clock when it was sent, and every event with its arrival."""

    sent_at: float
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Timing:
    """One request's output tokens, as times since it was sent, one per event that carried any."""

    num_tokens: int
    times_s: list[float]


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


def make_prompts(tokenizer_file: Path, num_prompts: int, prompt_len: int) -> list[list[int]]:
    """`num_prompts` different prompts of `prompt_len` ids: windows of the manual that Python brings along.

    Raises UserError when the manual is too short for so many.
    """
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = Tokenizer.from_file(str(tokenizer_file)).encode(text, add_special_tokens=False).ids
    if num_prompts * prompt_len > len(ids):
        raise UserError(
            f"{num_prompts} prompts of {prompt_len} tokens are more than the {len(ids)} tokens of text at "
            "hand; lower the concurrency or the prompt length"
        )
    return [ids[start : start + prompt_len] for start in range(0, num_prompts * prompt_len, prompt_len)]


def num_requests_at(concurrency: int) -> int:
    """Two full waves, and at least four requests, so that a median means something."""
    return max(4, 2 * concurrency)


def num_prompts_for(concurrencies: Sequence[int]) -> int:
    """How many prompts one server's life uses up."""
    return sum(concurrency + num_requests_at(concurrency) for concurrency in concurrencies)


async def measure_server(url: str, setting: Setting) -> list[Measurement]:
    """Warm the server up at every concurrency, then measure each; takes a fresh prompt for every request.

    Raises BenchError when a request fails, is shorter than asked, or stalls for two minutes.
    """
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=120)
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
            return await _measure_all(session, setting)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{type(error).__name__}: {error}") from error


async def _measure_all(session: aiohttp.ClientSession, setting: Setting) -> list[Measurement]:
    prompts = iter(setting.prompts)
    num_new_tokens = setting.workload.num_new_tokens
    model = await _model_name(session)
    for concurrency in setting.concurrencies:
        await _closed_loop(session, model, take(prompts, concurrency), concurrency, num_new_tokens=4)
    measurements: list[Measurement] = []
    for concurrency in setting.concurrencies:
        batch = take(prompts, num_requests_at(concurrency))
        before = await read_step_counters(session)
        streams, wall_s = await _closed_loop(session, model, batch, concurrency, num_new_tokens)
        after = await read_step_counters(session)
        timings = [read_stream(stream, num_new_tokens) for stream in streams]
        counters = after.since(before) if before and after else None
        measurements.append(summarise(timings, concurrency, wall_s, counters))
    return measurements


def take(prompts: Iterator[list[int]], count: int) -> list[list[int]]:
    """The next `count` prompts."""
    return [next(prompts) for _ in range(count)]


def read_stream(stream: Stream, num_new_tokens: int) -> Timing:
    """Turn raw events into times. Raises BenchError on an error event, a torn stream or a wrong length."""
    times_s: list[float] = []
    num_tokens = 0
    is_done = False
    for arrival, payload in stream.arrivals:
        if payload == b"[DONE]":
            is_done = True
            continue
        event = msgspec.json.decode(payload, type=_Event)
        if event.error is not None:
            raise BenchError(f"the server ended a stream with {payload.decode(errors='replace')[:300]}")
        if event.choices:
            times_s.append(arrival - stream.sent_at)
        if event.usage is not None:
            num_tokens = event.usage.completion_tokens
    if not is_done:
        raise BenchError("a stream ended without [DONE]")
    if num_tokens != num_new_tokens or not times_s:
        raise BenchError(
            f"a stream carried {num_tokens} tokens in {len(times_s)} events, not {num_new_tokens}"
        )
    return Timing(num_tokens=num_tokens, times_s=times_s)


def summarise(
    timings: Sequence[Timing], concurrency: int, wall_s: float, counters: StepCounters | None = None
) -> Measurement:
    """Reduce one closed loop of `wall_s` seconds to its row of the report."""
    gaps = [
        later - earlier for t in timings for earlier, later in zip(t.times_s, t.times_s[1:], strict=False)
    ]
    return Measurement(
        concurrency=concurrency,
        num_requests=len(timings),
        wall_s=wall_s,
        tokens_per_s=sum(t.num_tokens for t in timings) / wall_s,
        ttft_p50_s=median(t.times_s[0] for t in timings),
        tpot_p50_s=median((t.times_s[-1] - t.times_s[0]) / max(t.num_tokens - 1, 1) for t in timings),
        gap_p99_s=sorted(gaps)[int(0.99 * (len(gaps) - 1))] if gaps else 0.0,
        counters=counters,
    )


async def read_step_counters(session: aiohttp.ClientSession) -> StepCounters | None:
    """The idle engine's step counters, or None where the server has none (it is not Paceline)."""
    await asyncio.sleep(HEARTBEAT_S)
    async with session.get("/metrics") as response:
        if response.status != 200:
            return None
        text = await response.text()
    return parse_step_counters(text)


def parse_step_counters(exposition: str) -> StepCounters | None:
    """Read the step counters out of a Prometheus text exposition, summed over label sets."""
    sums = dict.fromkeys(_COUNTER_OF.values(), 0.0)
    is_found = False
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in _COUNTER_OF:
                sums[_COUNTER_OF[sample.name]] += sample.value
                is_found = True
    return msgspec.convert(sums | {"num_steps": int(sums["num_steps"])}, StepCounters) if is_found else None


_COUNTER_OF = {
    "paceline:steps_total": "num_steps",
    "paceline:step_plan_seconds_total": "plan_s",
    "paceline:step_wait_seconds_total": "wait_s",
    "paceline:step_compute_seconds_total": "compute_s",
}


async def _model_name(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as response:
        if response.status != 200:
            raise BenchError(f"GET /v1/models was answered {response.status}")
        return (await response.json())["data"][0]["id"]


async def _closed_loop(
    session: aiohttp.ClientSession,
    model: str,
    prompts: Sequence[list[int]],
    concurrency: int,
    num_new_tokens: int,
) -> tuple[list[Stream], float]:
    """Keep `concurrency` requests in flight until every prompt is answered; the streams and the wall time."""
    streams: list[Stream] = []
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            stream = await _stream(session, model, prompt, num_new_tokens)
            streams.append(stream)

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return streams, time.perf_counter() - started


async def _stream(
    session: aiohttp.ClientSession, model: str, prompt: list[int], num_new_tokens: int
) -> Stream:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    stream = Stream(sent_at=time.perf_counter())
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            raise BenchError(f"a request was answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if line.startswith(b"data:"):
                stream.arrivals.append((time.perf_counter(), line[5:].strip()))
    return stream
