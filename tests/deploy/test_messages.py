"""/v1/messages: Anthropic's client, streams equal to whole answers, stop reasons, and clear refusals."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from front import MODEL, ScriptedEngine

from paceline.cluster.errors import EngineError

SAYS = "the fox says 🦊 and goes on"
USER: list[Any] = [{"role": "user", "content": "the fox?"}]


@pytest.fixture
def client(served: tuple[str, ScriptedEngine]) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served[0], api_key="none", max_retries=0) as it:
        yield it


def test_anthropic_s_client_reads_an_answer(client: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 2
    message = client.messages.create(model=MODEL, max_tokens=50, system="be brief", messages=USER)

    assert [block.text for block in message.content if block.type == "text"] == [SAYS]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert message.usage.cache_read_input_tokens == 2
    assert message.usage.input_tokens == len(engine.prompts[-1]) - 2
    assert message.usage.output_tokens > 5


@pytest.mark.parametrize("tokens_per_step", [1, 4, 100])
def test_anthropic_s_client_reads_a_stream(
    client: anthropic.Anthropic, engine: ScriptedEngine, tokens_per_step: int
) -> None:
    engine.tokens_per_step = tokens_per_step
    whole = client.messages.create(model=MODEL, max_tokens=50, messages=USER)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=USER) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()

    assert text == SAYS
    assert [block.text for block in whole.content if block.type == "text"] == [SAYS]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_stop_reasons(client: anthropic.Anthropic) -> None:
    def reason(**fields: Any) -> tuple[Any, Any]:
        message = client.messages.create(model=MODEL, messages=USER, **fields)
        with client.messages.stream(model=MODEL, messages=USER, **fields) as stream:
            final = stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence) == (message.stop_reason, message.stop_sequence)
        return message.stop_reason, message.stop_sequence

    assert reason(max_tokens=3) == ("max_tokens", None)
    assert reason(max_tokens=50, stop_sequences=["zzz", "ox say"]) == ("stop_sequence", "ox say")
    assert reason(max_tokens=50, stop_sequences=["zzz"]) == ("end_turn", None)


def test_blocks_and_system_become_the_conversation(http: httpx.Client, engine: ScriptedEngine) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 4,
        "system": [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox?"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"},
                                              {"type": "text", "text": "yes"}]},
            {"role": "user", "content": "and"},
        ],
        "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 4,
    }  # fmt: skip
    assert http.post("/v1/messages", json=body).status_code == 200
    spoken, params = engine.prompts[-1], engine.params[-1]
    chat = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "the\nfox?"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "and"},
    ]
    http.post("/v1/chat/completions", json={"model": MODEL, "messages": chat})

    assert spoken == engine.prompts[-1]
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.5, 3, 0.5, 4)


def test_count_tokens(client: anthropic.Anthropic, http: httpx.Client) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=USER, system="be brief")
    message = client.messages.create(model=MODEL, max_tokens=1, messages=USER, system="be brief")

    assert counted.input_tokens == message.usage.input_tokens
    long = [{"role": "user", "content": "the fox " * 300}]  # counting is not answering
    reply = http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": long})
    assert reply.json()["input_tokens"] > 256


def test_errors_are_anthropic_s(
    client: anthropic.Anthropic, http: httpx.Client, engine: ScriptedEngine
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=USER)
    with pytest.raises(anthropic.BadRequestError) as long:
        client.messages.create(model=MODEL, max_tokens=5000, messages=USER)
    assert long.value.body["error"]["type"] == "invalid_request_error"  # pyright: ignore
    engine.fails_at, engine.failure = 3, EngineError("a rank died")
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=MODEL, max_tokens=50, messages=USER) as stream,
    ):
        stream.get_final_message()
    assert http.post("/v1/messages", content=b"{").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"max_tokens": None}, "invalid_type", "max_tokens"),
        ({"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
        ({"messages": []}, "empty_array", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", None),
        ({"messages": [{"role": "user", "content": []}]}, "empty_array", "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "unsupported_content_type",
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "invalid_type",
            "messages[0].content[0].tool_use_id",
        ),
        ({"system": 5}, "invalid_type", None),
        ({"system": [{"type": "image"}]}, "unsupported_content_type", "system"),
        ({"temperature": 3}, "decimal_above_max_value", "temperature"),
        ({"stop_sequences": [""]}, "empty_string", "stop_sequences[0]"),
        ({"top_p": 0}, "decimal_below_min_value", "top_p"),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_parameter", "tools[0]"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "some"}},
            "invalid_value",
            "tool_choice.type",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(
    http: httpx.Client, changes: dict[str, Any], code: str, param: str | None
) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": USER, **changes}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == code, error
    assert param is None or error["param"] == param
