"""What the front door costs: time to first token beyond the engine's own, and processor time per token.

Run `python tests/bench_front.py`. Everything is real but the engine: the default model's tokenizer and chat
template, the application with its gate, a socket, and clients in a process of their own. The engine emits at
once, a token or a few per step, so whatever time passes is the front door's.
"""

import argparse
import asyncio
import dataclasses
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
from front import listening, scripted_front

from paceline.cluster.messages import Output, SamplingParams
from paceline.cluster.model_source import resolve_model
from paceline.deploy.api.front import Front
from paceline.deploy.api.keys import KeyRing, load_keys
from paceline.deploy.api.text import Tokenizer
from paceline.deploy.api.validate import ServedModel

KEY = "sk-bench-front"
QUESTION = "Tell me how a paceline works, and why the riders take turns at the front of it. " * 6


class InstantEngine:
    """A TokenSource whose tokens are always there; between steps it lets the loop run."""

    def __init__(self, token_ids: Sequence[int], per_step: int) -> None:
        self._token_ids = list(token_ids)
        self._per_step = per_step

    async def stream(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        cache_salt: str = "",
        max_draft_tokens: int | None = None,
        is_traced: bool = False,
    ) -> AsyncGenerator[Output, None]:
        del prompt_ids, priority, cache_salt, max_draft_tokens, is_traced
        num_tokens, ids = params.max_tokens, self._token_ids
        for first in range(0, num_tokens, self._per_step):
            await asyncio.sleep(0)
            chunk = [ids[i % len(ids)] for i in range(first, min(first + self._per_step, num_tokens))]
            is_last = first + len(chunk) == num_tokens
            yield Output(
                request_id=request_id,
                first_index=first,
                token_ids=chunk,
                finish_reason="length" if is_last else None,
                num_drafts=len(chunk) - 1,
                num_accepted=len(chunk) - 1,
            )


def front_door(model: Path, folder: Path, per_step: int) -> Front:
    tokenizer = Tokenizer.load(model)
    engine = InstantEngine(tokenizer.encode_word("The riders take turns at the front. "), per_step)
    scripted, _ = scripted_front(folder)
    served = ServedModel(
        name="bench",
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=8192,
        eos_token_ids=(),
    )
    ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": KEY}))
    return dataclasses.replace(scripted, source=engine, served=served, keys=ring)


async def ask(session: aiohttp.ClientSession, url: str, num_tokens: int) -> float:
    """Seconds to the first event of a stream, which is read to its end."""
    body = {
        "model": "bench",
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": num_tokens,
        "stream": True,
    }
    began = time.perf_counter()
    first_s = 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for _ in response.content:
            first_s = first_s or time.perf_counter() - began
    return first_s


async def clients(url: str, num_streams: int, num_rounds: int, num_tokens: int) -> list[float]:
    headers = {"authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        await ask(session, url, 4)

        async def one() -> list[float]:
            return [await ask(session, url, num_tokens) for _ in range(num_rounds)]

        told = await asyncio.gather(*(one() for _ in range(num_streams)))
    return [first_s for times in told for first_s in times]


def run_clients(url: str, num_streams: int, num_rounds: int, num_tokens: int, results: object) -> None:
    results.put(asyncio.run(clients(url, num_streams, num_rounds, num_tokens)))  # pyright: ignore


def measure(url: str, num_streams: int, num_rounds: int, num_tokens: int) -> tuple[list[float], float]:
    """Seconds to first events, and processor seconds of this process, with the clients in another."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    before = resource.getrusage(resource.RUSAGE_SELF)
    process = context.Process(target=run_clients, args=(url, num_streams, num_rounds, num_tokens, results))
    process.start()
    times = results.get(timeout=300)
    process.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return times, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    model = resolve_model("default")
    for per_step in (1, 4):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            front = front_door(model, folder, per_step)
            url = stack.enter_context(listening(front))
            times, _ = measure(url, 1, asked.rounds, 8)
            _, cpu_s = measure(url, 32, 4, asked.tokens)
            num_tokens = 32 * 4 * asked.tokens
            print(
                json.dumps(
                    {
                        "tokens_per_step": per_step,
                        "first_event_ms_median": round(1e3 * statistics.median(times), 2),
                        "first_event_ms_p90": round(1e3 * statistics.quantiles(times, n=10)[-1], 2),
                        "cpu_us_per_token_32_streams": round(1e6 * cpu_s / num_tokens, 1),
                    }
                )
            )


if __name__ == "__main__":
    main()
