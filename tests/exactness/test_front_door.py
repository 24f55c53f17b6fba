"""What the HTTP API says of the real model is the same with drafts as without: float32, token for token.

Everything that lies between tokens and an answer is in the way: calls of tools, grammars, log-probabilities,
several choices, stop strings, streams. The drafter is right, wrong or both within a block.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import events, listening
from proposers import Continuations, Known, ScriptedProposer, mixed
from streams import wait_idle

from paceline.cluster.config import load_config
from paceline.cluster.messages import Output, SamplingParams
from paceline.deploy.api.front import front_of
from paceline.deploy.api.streaming import TokenSource
from paceline.deploy.assemble import start_local_engine
from paceline.deploy.engine import Engine

NUM_DRAFTS = 5
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LIST = 'root ::= item ("; " item){2}\nitem ::= [a-z]{2,8}'


def asked(question: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "max_tokens": 24, **fields}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tools, auto": (CHAT, asked("How is the weather in Paris?", temperature=0, tools=[WEATHER, CLOCK])),
    "tools, auto, strict": (CHAT, asked("The weather in Rome, please.", seed=1, tools=[STRICT])),
    "tools, required": (
        CHAT,
        asked("Paris and Rome?", seed=2, tools=[WEATHER, CLOCK], tool_choice="required", max_tokens=40),
    ),
    "tools, named": (
        CHAT,
        asked(
            "How warm is it in Oslo?",
            temperature=0,
            tools=[CLOCK, WEATHER],
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
        ),
    ),
    "json_schema, logprobs": (
        CHAT,
        asked(
            "Invent a person.",
            seed=3,
            n=2,
            logprobs=True,
            top_logprobs=2,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
        ),
    ),
    "regex": (
        CHAT,
        asked("When?", temperature=0, structured_outputs={"regex": "[0-2][0-9]:[0-5][0-9] (am|pm)"}),
    ),
    "choice": (CHAT, asked("Tea?", seed=4, structured_outputs={"choice": ["yes, please", "no, thank you"]})),
    "grammar": (
        TEXT,
        {"prompt": "Fruit:", "seed": 5, "structured_outputs": {"grammar": LIST}, "max_tokens": 24},
    ),
    "logprobs": (CHAT, asked("Why is the sky blue?", seed=6, top_p=0.9, logprobs=True, top_logprobs=3)),
    "two choices": (CHAT, asked("Tell a story.", seed=7, n=2, max_tokens=24)),
    "stop strings": (CHAT, asked("Count from one to ten.", temperature=0, stop=["5", "five"])),
    "stop strings, two prompts": (
        TEXT,
        {"prompt": ["1, 2, 3,", "a b c a b c a"], "seed": 8, "n": 2, "stop": [" 9,", "\n"], "max_tokens": 24},
    ),
}  # fmt: skip


class Recorder:
    """The engine's tokens; what is said without drafts it keeps for a drafter that knows it."""

    def __init__(self, engine: TokenSource, known: Continuations) -> None:
        self._engine = engine
        self._known = known

    async def stream(
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, *rest: Any, **options: Any
    ) -> AsyncGenerator[Output, None]:
        told: list[int] = []
        made = self._engine.stream(request_id, prompt_ids, params, *rest, **options)
        async with aclosing(made) as outputs:
            async for output in outputs:
                told += output.token_ids
                if options["max_draft_tokens"] == 0:
                    self._known.learn(prompt_ids, params, Known(list(told)))
                yield output


@pytest.fixture(scope="module")
def served(default_model: Path) -> Iterator[tuple[str, Engine]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    known = Continuations()
    flags = {
        "model": str(default_model), "served_model_name": "real", "dtype": "float32", "num_threads": 1,
        "kv_cache_gib": 0.1, "max_model_len": 512, "draft_budget": False, "check_invariants": True,
        "num_draft_tokens": NUM_DRAFTS,
    }  # fmt: skip
    config = load_config(flags=flags, environ={})
    starting = start_local_engine(
        config, default_model, make_proposer=lambda _: ScriptedProposer(mixed, known, max_drafts=NUM_DRAFTS)
    )
    engine = asyncio.run_coroutine_threadsafe(starting, loop).result(60)
    front = front_of(config, default_model, engine, "0")
    with listening(replace(front, source=Recorder(front.source, known)), loop) as url:
        yield url, engine
    asyncio.run_coroutine_threadsafe(engine.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def all_asked(url: str, **fields: Any) -> dict[str, httpx.Response]:
    """Every case at once."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as client:
        replies = await asyncio.gather(
            *(
                client.post(path, json={"model": "real", "return_token_ids": True, **body, **fields})
                for path, body in CASES.values()
            )
        )
    for reply in replies:
        assert reply.status_code == 200, reply.text
    return dict(zip(CASES, replies, strict=True))


def told(reply: dict[str, Any]) -> Any:
    """All of an answer that is the model's: not the names that the server gives."""
    for choice in reply["choices"]:
        for call in choice.get("message", {}).get("tool_calls", []):
            del call["id"]
    return reply["choices"], reply["usage"]["completion_tokens"]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """By choice: what a stream's chunks add up to, of what a whole answer has under the same names."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            so_far = choices.setdefault(part["index"], {"text": "", "calls": {}, "ids": [], "logprobs": []})
            delta = part.get("delta", {})
            so_far["text"] += delta.get("content") or part.get("text") or ""
            for call in delta.get("tool_calls", []):
                name, arguments = so_far["calls"].get(call["index"], ("", ""))
                function = call["function"]
                so_far["calls"][call["index"]] = (
                    name + function.get("name", ""), arguments + function["arguments"]
                )  # fmt: skip
            so_far["ids"] += part.get("token_ids", [])
            so_far["logprobs"] += (part["logprobs"] or {}).get("content") or []
            so_far["reason"] = part["finish_reason"] or so_far.get("reason")
    return choices


def as_joined(reply: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """A whole answer in the same form."""
    return {
        choice["index"]: {
            "text": choice.get("text", choice.get("message", {}).get("content")) or "",
            "calls": {
                index: (call["function"]["name"], call["function"]["arguments"])
                for index, call in enumerate(choice.get("message", {}).get("tool_calls", []))
            },
            "ids": choice["token_ids"],
            "logprobs": (choice["logprobs"] or {}).get("content") or [],
            "reason": choice["finish_reason"],
        }
        for choice in reply["choices"]
    }


def test_every_answer_is_the_same_with_drafts(served: tuple[str, Engine]) -> None:
    url, engine = served

    def ask(**fields: Any) -> dict[str, httpx.Response]:
        return asyncio.run(all_asked(url, **fields))

    plain = {name: reply.json() for name, reply in ask(speculation={"enabled": False}).items()}
    assert engine.stats.num_drafts == 0
    drafted = {name: reply.json() for name, reply in ask().items()}
    streamed = ask(stream=True, speculation={"max_draft_tokens": 3})

    expected = {name: as_joined(reply) for name, reply in plain.items()}
    assert {name: joined(events(reply)[:-1]) for name, reply in streamed.items()} == expected
    assert {name: told(reply) for name, reply in drafted.items()} == {
        name: told(reply) for name, reply in plain.items()
    }
    asyncio.run(wait_idle(engine))  # until the counters are those of all
    assert engine.stats.num_draft_tokens > engine.stats.num_accepted_tokens > 100  # some were wrong
    for name in ("tools, required", "tools, named"):
        assert expected[name][0]["calls"]
    assert expected["json_schema, logprobs"][0]["text"].startswith("{")
    assert expected["stop strings"][0]["reason"] == "stop"
