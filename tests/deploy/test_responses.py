"""/v1/responses: OpenAI's client, OpenAI's schemas, streams equal to whole answers, and clear refusals."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from front import MODEL, ScriptedEngine
from openai_schemas import load, valid

from paceline.cluster.errors import EngineError

SAYS = "the fox says 🦊 and goes on"
EVENTS = {
    "response.created": "ResponseCreatedEvent",
    "response.in_progress": "ResponseInProgressEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent",
    "response.output_text.done": "ResponseTextDoneEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.completed": "ResponseCompletedEvent",
    "response.incomplete": "ResponseIncompleteEvent",
    "response.failed": "ResponseFailedEvent",
    "error": "ResponseErrorEvent",
}


@pytest.fixture
def client(served: tuple[str, ScriptedEngine]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0]}/v1", api_key="none", max_retries=0) as it:
        yield it


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "the fox?", **fields}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    told: list[dict[str, Any]] = []
    for block in response.text.split("\n\n")[:-1]:
        kind, content = block.split("\n")
        told.append(json.loads(content.removeprefix("data: ")))
        assert kind == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def test_openai_s_client_reads_an_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="the fox?", instructions="be brief")

    assert response.output_text == SAYS
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.to_dict()["store"] is False


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
def test_openai_s_client_reads_a_stream(
    client: openai.OpenAI, engine: ScriptedEngine, tokens_per_step: int
) -> None:
    engine.tokens_per_step = tokens_per_step
    with client.responses.stream(model=MODEL, input="the fox?") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()

    assert text == final.output_text == SAYS
    assert final.usage is not None
    assert final.usage.output_tokens > 5


def test_instructions_and_items_become_the_conversation(http: httpx.Client, engine: ScriptedEngine) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "the fox?"},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "yes", "annotations": []}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}]},
    ]
    assert http.post("/v1/responses", json=ask(input=items, instructions="brief")).status_code == 200
    spoken = engine.prompts[-1]
    chat = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "the fox?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and"},
    ]
    http.post("/v1/chat/completions", json={"model": MODEL, "messages": chat})

    assert spoken == engine.prompts[-1]


def test_parameters_reach_the_engine(http: httpx.Client, engine: ScriptedEngine) -> None:
    body = ask(max_output_tokens=3, temperature=0.5, top_p=0.25, top_k=7, seed=9, stop=["zzz"],
               cache_salt="mine", speculation={"max_draft_tokens": 2})  # fmt: skip
    reply = http.post("/v1/responses", json=body).json()

    params = engine.params[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (3, 0.5, 0.25, 7)
    assert (params.seed, engine.salts[-1], engine.draft_limits[-1]) == (9, "mine", 2)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (reply["temperature"], reply["top_p"], reply["max_output_tokens"]) == (0.5, 0.25, 3)


@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("max_output_tokens", [None, 3])
def test_answers_and_events_are_what_openai_s_schemas_say(
    http: httpx.Client, with_logprobs: bool, max_output_tokens: int | None
) -> None:
    schemas = load()
    body = ask(max_output_tokens=max_output_tokens, metadata={"a": "b"})
    if with_logprobs:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = http.post("/v1/responses", json=body).json()
    valid(schemas, "Response", whole)
    told = events(http.post("/v1/responses", json={**body, "stream": True}))
    for event in told:
        valid(schemas, EVENTS[event["type"]], event)
    last = told[-1]["response"]

    def essence(response: dict[str, Any]) -> Any:
        texts = [part for item in response["output"] for part in item["content"]]
        return texts, response["status"], response["usage"], response["incomplete_details"]

    assert essence(last) == essence(whole)
    assert bool(whole["output"][0]["content"][0]["logprobs"]) is with_logprobs


def test_a_failure_in_the_middle_is_an_event(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.fails_at, engine.failure = 3, EngineError("a rank died")
    told = events(http.post("/v1/responses", json=ask(stream=True)))

    assert [event["type"] for event in told[-2:]] == ["error", "response.failed"]
    assert told[-1]["response"]["error"]["code"] == "server_error"
    schemas = load()
    for event in told[-2:]:
        valid(schemas, EVENTS[event["type"]], event)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": None}, "invalid_type", "model"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"input": None}, "invalid_type", "input"),
        ({"input": ""}, None, None),
        ({"input": []}, "empty_array", "input"),
        ({"input": [{"role": "king", "content": "x"}]}, "invalid_value", "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "unsupported_parameter", "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]},
            "unsupported_content_type",
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "invalid_type", "input[0].call_id"),
        ({"input": "x" * 100_000}, "context_length_exceeded", "input"),
        ({"max_output_tokens": 0}, "integer_below_min_value", "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "context_length_exceeded", "input"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter", "previous_response_id"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"include": ["file_search_call.results"]}, "conflicting_parameters", "include"),
        ({"top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
        ({"temperature": 3}, "decimal_above_max_value", "temperature"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", None),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    http: httpx.Client, changes: dict[str, Any], code: str | None, param: str | None
) -> None:
    response = http.post("/v1/responses", json=ask(**changes))
    if code is None:
        assert response.status_code == 200
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    assert param is None or error["param"] == param
