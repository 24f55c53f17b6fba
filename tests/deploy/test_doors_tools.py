"""Thoughts and calls of tools through every API: the same answer in OpenAI's and Anthropic's words."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from front import MODEL, ScriptedEngine, listening, scripted_front
from openai_schemas import load, valid

from paceline.deploy.api.conversation import ChatFormat
from paceline.deploy.api.tool_formats import choose_tool_format

CALL = '{"name": "weather", "arguments": {"city": "Paris"}}'
SCRIPT = f"<think>hm, so</think>Let me see. <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES_TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
MESSAGES_TOOL: Any = {"name": "weather", "description": "of a city", "input_schema": PARAMETERS}
USER: list[Any] = [{"role": "user", "content": "rain?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    form = ChatFormat(tools=choose_tool_format("hermes", ""), has_thoughts=True)
    engine.script = SCRIPT
    served = replace(front.served, chat_format=form, max_model_len=4096)
    with listening(replace(front, served=served)) as url:
        yield url, engine


@pytest.fixture(params=[1, 5, 200])
def url(served: tuple[str, ScriptedEngine], request: pytest.FixtureRequest) -> str:
    served[1].tokens_per_step = request.param
    return served[0]


def test_responses(url: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "rain?", "tools": [RESPONSES_TOOL]}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            events = list(stream)
            final = stream.get_final_response()

    for response in (whole, final):
        thought, message, *calls = response.output
        assert thought.type == "reasoning"
        assert [part.text for part in thought.content or []] == ["hm, so"]
        assert message.type == "message"
        assert response.output_text.strip() == "Let me see."
        assert [(c.name, json.loads(c.arguments)) for c in calls if c.type == "function_call"] == [
            ("weather", {"city": "Paris"})
        ] * 2
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Paris"}' * 2


def test_tokens_of_thoughts_are_counted(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        thought = httpx.post(
            f"{url}/tokenize", json={"prompt": "<think>hm, so</think>"}, trust_env=False
        ).json()
        response = client.responses.create(model=MODEL, input="rain?")
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == thought["count"]
        options: Any = {"include_usage": True}
        *_, last = client.chat.completions.create(
            model=MODEL, messages=USER, stream=True, stream_options=options
        )
    assert last.usage is not None
    assert last.usage.completion_tokens_details is not None
    assert last.usage.completion_tokens_details.reasoning_tokens == thought["count"]
    assert last.usage.completion_tokens == response.usage.output_tokens


def test_events_of_responses_are_openai_s(url: str) -> None:
    schemas = load()
    body = {"model": MODEL, "input": "rain?", "tools": [RESPONSES_TOOL], "stream": True}
    reply = httpx.post(f"{url}/v1/responses", json=body, trust_env=False)
    for block in reply.text.split("\n\n")[:-1]:
        event = json.loads(block.partition("\ndata: ")[2])
        name = "".join(part.capitalize() for part in event["type"].replace(".", "_").split("_"))
        valid(schemas, f"{name.replace('OutputText', 'Text')}Event", event)
    valid(schemas, "Response", httpx.post(f"{url}/v1/responses", json={**body, "stream": False}).json())


def test_messages(url: str) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": USER, "tools": [MESSAGES_TOOL]}
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()

    for message in (whole, final):
        thought, words, *calls = message.content
        assert thought.type == "thinking"
        assert thought.thinking == "hm, so"
        assert words.type == "text"
        assert words.text.strip() == "Let me see."
        assert [(c.name, c.input) for c in calls if c.type == "tool_use"] == [
            ("weather", {"city": "Paris"})
        ] * 2
        assert message.stop_reason == "tool_use"


def test_a_conversation_with_calls_reads_the_same_in_every_api(served: tuple[str, ScriptedEngine]) -> None:
    url, engine = served

    def asked(path: str, **body: Any) -> list[int]:
        reply = httpx.post(url + path, json={"model": MODEL, **body}, trust_env=False)
        assert reply.status_code == 200, reply.text
        return engine.prompts[-1]

    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
    }
    chat = asked(
        "/v1/chat/completions",
        messages=[
            *USER,
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "wet"},
        ],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}],
    )
    responses = asked(
        "/v1/responses",
        input=[
            *USER,
            {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "function_call",
                "call_id": "call_1",
                "name": "weather",
                "arguments": '{"city": "Paris"}',
            },
            {"type": "function_call_output", "call_id": "call_1", "output": "wet"},
        ],
        tools=[{"type": "function", "name": "weather", "parameters": PARAMETERS}],
    )
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Paris"}}
    messages = asked(
        "/v1/messages",
        max_tokens=50,
        messages=[
            *USER,
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "wet"}]},
        ],
        tools=[{"name": "weather", "input_schema": PARAMETERS}],
    )

    assert chat == responses == messages


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "tools": [RESPONSES_TOOL],
                           "tool_choice": {"type": "function", "name": "weather"}}),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "s",
                                                             "schema": PARAMETERS, "strict": True}}}),
        ("/v1/messages", {"max_tokens": 40, "messages": USER, "tools": [MESSAGES_TOOL],
                          "tool_choice": {"type": "tool", "name": "weather"}}),
        ("/v1/messages", {"max_tokens": 40, "messages": USER, "tools": [MESSAGES_TOOL],
                          "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ],
)  # fmt: skip
def test_what_must_be_called_or_matched_becomes_a_grammar(
    served: tuple[str, ScriptedEngine], path: str, body: dict[str, Any]
) -> None:
    url, engine = served
    reply = httpx.post(url + path, json={"model": MODEL, **body}, trust_env=False)

    assert reply.status_code == 200, reply.text
    assert engine.params[-1].grammar is not None
