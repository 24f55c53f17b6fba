"""Streams from a real engine (tiny weights, no Ray) over real sockets, and clients that leave."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import MODEL, byte_level, listening, loaded, scripted_front
from tiny import make_checkpoint

from paceline.cluster.config import load_config
from paceline.cluster.errors import EngineError
from paceline.cluster.messages import Stats
from paceline.deploy.api.front import Front, front_of
from paceline.deploy.api.streaming import merge, stream_choice
from paceline.deploy.api.validate import prepare_completion
from paceline.deploy.assemble import start_local_engine
from paceline.deploy.engine import Engine


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of a thread of its own, where the engine and its application live."""
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever, daemon=True)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join()
    running.close()


@pytest.fixture(scope="module")
def engine(
    loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Front]]:
    path = make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")
    loaded(byte_level(), path)
    flags = {
        "model": str(path), "served_model_name": MODEL, "dtype": "float32", "kv_cache_gib": 0.01,
        "num_threads": 1, "check_invariants": True, "draft_budget": False,
    }  # fmt: skip
    config = load_config(flags=flags, environ={})
    started = asyncio.run_coroutine_threadsafe(start_local_engine(config, path), loop).result(60)
    yield started, front_of(config, path, started, "0")
    asyncio.run_coroutine_threadsafe(started.close(), loop).result(60)


@pytest.fixture(scope="module")
def url(engine: tuple[Engine, Front], loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    with listening(engine[1], loop) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60, limits=limits) as http:
        yield http


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "the quick", "max_tokens": 40, "ignore_eos": True, "seed": 3, **fields}


async def texts(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, str]:
    """Streamed text by choice."""
    got: dict[int, str] = {}
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        got[choice["index"]] = got.get(choice["index"], "") + choice["text"]
    return got


async def whole(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, str]:
    reply = (await client.post("/v1/completions", json=body)).json()
    return {choice["index"]: choice["text"] for choice in reply["choices"]}


async def assert_idle(client: httpx.AsyncClient, engine: Engine) -> None:
    """Within a few heartbeats nothing runs and every page is free."""
    for _ in range(400):
        stats = engine.stats
        if not engine.num_streams and not stats.num_running and stats.num_free_pages == stats.num_pages > 0:
            break
        await asyncio.sleep(0.01)
    shown = (await client.get("/metrics")).text
    numbers = {line.split("{")[0]: float(line.split()[-1]) for line in shown.splitlines() if line[0] != "#"}
    assert numbers["vllm:num_requests_running"] == 0
    assert numbers["paceline:num_free_pages"] == numbers["paceline:num_pages"] > 0


async def fresh_stats(engine: Engine) -> Stats:
    """The next heartbeat, which knows of everything that was received before."""
    last = engine.stats
    while engine.stats is last:
        await asyncio.sleep(0.01)
    return engine.stats


async def test_streamed_text_is_the_text(client: httpx.AsyncClient) -> None:
    for body in (completion(temperature=0), completion(n=3), completion(stop=["a", " the"], n=2)):
        assert await texts(client, body) == await whole(client, body)


async def test_choices_differ_and_seeds_repeat(client: httpx.AsyncClient) -> None:
    body = completion(n=3)
    first = await whole(client, body)
    assert len(set(first.values())) == 3
    assert await whole(client, body) == first
    assert (await whole(client, completion()))[0] == first[0]
    assert await whole(client, completion(seed=4)) != await whole(client, completion())


async def test_32_streams_at_once_say_what_each_says_alone(
    client: httpx.AsyncClient, engine: tuple[Engine, Front]
) -> None:
    bodies = [completion(seed=seed, prompt=f"fox {seed}", max_tokens=20 + seed) for seed in range(32)]
    together = await asyncio.gather(*(texts(client, body) for body in bodies))
    for body, text in zip(bodies[::7], together[::7], strict=True):
        assert await whole(client, body) == text
    await assert_idle(client, engine[0])


@pytest.mark.parametrize("num_choices", [1, 4])
async def test_a_client_that_leaves_a_stream_is_cancelled(
    client: httpx.AsyncClient, engine: tuple[Engine, Front], num_choices: int
) -> None:
    body = completion(stream=True, max_tokens=480, n=num_choices)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        num_lines = 0
        async for _ in response.aiter_lines():
            num_lines += 1
            if num_lines == 6:
                break
    await assert_idle(client, engine[0])
    assert engine[0].stats.num_generated_tokens > 0


async def test_a_client_that_leaves_an_answer_is_cancelled(
    client: httpx.AsyncClient, engine: tuple[Engine, Front]
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await client.post("/v1/completions", json=completion(max_tokens=480, n=8), timeout=0.1)
    await assert_idle(client, engine[0])
    assert (await whole(client, completion(max_tokens=2)))[0]


async def test_a_stop_string_frees_the_engine(
    client: httpx.AsyncClient, engine: tuple[Engine, Front]
) -> None:
    text = (await whole(client, completion(temperature=0)))[0]
    reply = (await client.post("/v1/completions", json=completion(temperature=0, stop=text[5:8]))).json()
    assert text.startswith(reply["choices"][0]["text"])
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] < 40
    await assert_idle(client, engine[0])


async def test_logprobs_of_greedy_tokens_are_the_largest(client: httpx.AsyncClient) -> None:
    body = completion(temperature=0, logprobs=2, max_tokens=8)
    logprobs = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 8
    for own, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert own == max(top.values()) < 0


async def test_drafts_change_no_text_and_every_report_adds_up(
    client: httpx.AsyncClient, engine: tuple[Engine, Front]
) -> None:
    """Prompt lookup; the engine's counters tell of the same drafts."""
    before = await fresh_stats(engine[0])
    num_drafts = num_accepted = 0
    for seed in range(4):
        body = completion(prompt="the fox the fox the fox", seed=seed, temperature=0.1, max_tokens=60)
        plain = (
            await client.post("/v1/completions", json={**body, "speculation": {"enabled": False}})
        ).json()
        drafted = (
            await client.post("/v1/completions", json={**body, "speculation": {"report": True}})
        ).json()
        assert drafted["choices"] == plain["choices"]
        report = drafted["metrics"]["speculative_decoding"]
        num_drafts += report["num_draft_tokens"]
        num_accepted += report["num_accepted_draft_tokens"]
        assert sum(report["acceptance_histogram"]) == report["num_spec_steps"]
    after = await fresh_stats(engine[0])
    assert after.num_draft_tokens - before.num_draft_tokens == num_drafts > 0
    assert after.num_accepted_tokens - before.num_accepted_tokens == num_accepted > 0


async def test_a_known_prefix_is_told_of_unless_the_salt_differs(client: httpx.AsyncClient) -> None:
    async def cached(**fields: Any) -> int:
        body = completion(prompt=[7 + i % 300 for i in range(100)], max_tokens=2, **fields)
        usage = (await client.post("/v1/completions", json=body)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert await cached() == 0
    assert await cached() == 96
    assert await cached(cache_salt="mine") == 0
    assert await cached(cache_salt="mine", n=2) == 96


async def test_one_failing_choice_fails_all_and_leaves_none_running(tmp_path: Path) -> None:
    front, scripted = scripted_front(tmp_path)
    body = json.dumps(
        {"model": MODEL, "prompt": ["a", "b", "c"], "ignore_eos": True, "max_tokens": 50}
    ).encode()
    choices = prepare_completion(body, front.served).choices
    scripted.fails_at, scripted.failure = 5, EngineError("gone")
    streams = [
        stream_choice(scripted, front.served.tokenizer, str(c.index), c, front.metrics.start())
        for c in choices
    ]
    with pytest.raises(EngineError, match="gone"):
        async for _ in merge(streams):
            pass
    assert not scripted.live
    shown = front.metrics.render().decode()
    counts = {
        reason: float(
            shown.split(f'vllm:request_success_total{{engine="0",finished_reason="{reason}"')[1].split()[1]
        )
        for reason in ("error", "abort")
    }
    assert counts["error"] >= 1
    assert sum(counts.values()) == 3
