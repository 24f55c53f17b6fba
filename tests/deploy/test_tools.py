"""Calls and thoughts in chat answers: whole and streamed they say the same, to the client too."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from front import MODEL, ScriptedEngine, listening, scripted_front
from openai_schemas import load, valid

from paceline.deploy.api.conversation import ChatFormat
from paceline.deploy.api.tool_formats import choose_tool_format

ARGUMENTS = '{"fox": "🦊", "on": 12}'
SCRIPT = f'well\n<tool_call>\n{{"name": "go", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOOL: dict[str, Any] = {"name": "go", "parameters": {"type": "object", "properties": {"fox": {}}}}
TOOLS: list[Any] = [{"type": "function", "function": TOOL}]
USER: list[Any] = [{"role": "user", "content": "the fox?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    form = ChatFormat(choose_tool_format("hermes", ""), has_thoughts=True)
    with listening(replace(front, served=replace(front.served, chat_format=form, max_model_len=1024))) as url:
        yield url, engine


@pytest.fixture(params=[1, 3, 1000])
def engine(served: tuple[str, ScriptedEngine], request: pytest.FixtureRequest) -> ScriptedEngine:
    """Says a thought, some words and a call, so many tokens a step."""
    engine = served[1]
    engine.script = f"<think>\nhm\n</think>\n\n{SCRIPT}"
    engine.tokens_per_step = request.param
    return engine


def test_chat(served: tuple[str, ScriptedEngine], engine: ScriptedEngine) -> None:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": USER, "tools": TOOLS}
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            streamed = stream.get_final_completion().choices[0]
        for choice in (whole, streamed):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "well"
            assert choice.message.to_dict()["reasoning_content"] == "hm"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("go", ARGUMENTS)
        said = streamed.message.to_dict()
        result = {"role": "tool", "tool_call_id": call.id, "content": "gone"}
        turns: Any = [*USER, said, result]
        client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)
        assert len(engine.prompts[-1]) > len(engine.prompts[-2])


@pytest.mark.usefixtures("engine")
def test_every_chunk_is_what_the_schema_says(served: tuple[str, ScriptedEngine]) -> None:
    schemas = load()
    body = {"model": MODEL, "messages": USER, "tools": TOOLS, "stream": True, "logprobs": True}
    told = httpx.post(f"{served[0]}/v1/chat/completions", json=body, trust_env=False).text
    for line in told.splitlines():
        if line.startswith("data: {"):
            valid(schemas, "CreateChatCompletionStreamResponse", json.loads(line.removeprefix("data: ")))


@pytest.mark.usefixtures("engine")
def test_without_tools_a_call_is_words(served: tuple[str, ScriptedEngine]) -> None:
    for changes in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        body = {"model": MODEL, "messages": USER, **changes}
        choice = httpx.post(f"{served[0]}/v1/chat/completions", json=body, trust_env=False).json()["choices"][
            0
        ]
        assert choice["message"]["content"] == SCRIPT
        assert choice["finish_reason"] == "stop"
