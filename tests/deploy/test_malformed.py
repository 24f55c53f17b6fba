"""Malformed requests: each gets a 4xx in OpenAI's shape that names the field, and harms nothing."""

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front import MAX_MODEL_LEN, MODEL, ScriptedEngine, listening, scripted_front

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    with listening(front) as url, httpx.Client(base_url=url, trust_env=False) as client:
        yield client, engine


def good(path: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [USER]} if path == CHAT else {"model": MODEL, "prompt": "hi"}


def with_content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


OMIT = object()

TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = "response_format.json_schema.schema"


def schema(schema: Any, **more: Any) -> dict[str, Any]:
    wrapper = {"name": "it", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": wrapper}}


def nested(depth: int) -> dict[str, Any]:
    return {"items": nested(depth - 1)} if depth else {}


# path, changes to a good request, code, param
FIELDS: list[tuple[str, dict[str, Any], str, str | None]] = [
    (CHAT, {"model": OMIT}, "missing_required_parameter", "model"),
    (CHAT, {"model": None}, "invalid_type", "model"),
    (CHAT, {"model": 5}, "invalid_type", "model"),
    (CHAT, {"model": "m" * 2000}, "string_above_max_length", "model"),
    (CHAT, {"messages": OMIT}, "missing_required_parameter", "messages"),
    (CHAT, {"messages": []}, "empty_array", "messages"),
    (CHAT, {"messages": "hi"}, "invalid_type", "messages"),
    (CHAT, {"messages": {"role": "user"}}, "invalid_type", "messages"),
    (CHAT, {"messages": ["hi"]}, "invalid_type", "messages[0]"),
    (CHAT, {"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages[0].role"),
    (CHAT, {"messages": [{"role": "king", "content": "hi"}]}, "invalid_value", "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
    (CHAT, with_content(None), "invalid_type", "messages[0].content"),
    (CHAT, with_content(5), "invalid_type", "messages[0].content"),
    (CHAT, with_content({}), "invalid_type", "messages[0].content"),
    (CHAT, with_content([]), "empty_array", "messages[0].content"),
    (CHAT, with_content(["hi"]), "invalid_type", "messages[0].content"),
    (CHAT, with_content([{"type": "text"}]), "invalid_type", "messages[0].content"),
    (CHAT, with_content([{"type": "image_url", "image_url": {"url": "http://127.0.0.1"}}]),
     "unsupported_content_type", "messages[0].content"),
    (CHAT, {"messages": [USER] * 2049}, "array_above_max_length", "messages"),
    (CHAT, {"messages": [USER, {"role": "system", "content": "late"}]}, "invalid_messages", "messages"),
    (CHAT, {"messages": [{**USER, "tool_calls": [{}]}]}, "missing_required_parameter",
     "messages[0].tool_calls[0].id"),
    (CHAT, {"messages": [{**USER, "tool_calls": [CALL]}]}, "conflicting_parameters", "messages[0]"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "x"}]}, "conflicting_parameters", "messages[1]"),
    (CHAT, {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "lost"}]},
     "conflicting_parameters", "messages"),
    (TEXT, {"prompt": OMIT}, "missing_required_parameter", "prompt"),
    (TEXT, {"prompt": None}, "invalid_type", "prompt"),
    (TEXT, {"prompt": 5}, "invalid_type", "prompt"),
    (TEXT, {"prompt": {}}, "invalid_type", "prompt"),
    (TEXT, {"prompt": ""}, "empty_array", "prompt"),
    (TEXT, {"prompt": []}, "empty_array", "prompt"),
    (TEXT, {"prompt": [[]]}, "empty_array", "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "invalid_type", "prompt"),
    (TEXT, {"prompt": ["a"] * 65}, "array_above_max_length", "prompt"),
    (TEXT, {"prompt": [-1]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [1, 10**9]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [1, 2**70]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [1.5]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [True]}, "invalid_token_id", "prompt"),
    (TEXT, {"prompt": [3] * MAX_MODEL_LEN}, "context_length_exceeded", "prompt"),
    (TEXT, {"prompt": [3] * 10, "max_tokens": MAX_MODEL_LEN - 9}, "context_length_exceeded", "prompt"),
    (TEXT, {"best_of": 2}, "unsupported_parameter", "best_of"),
    (TEXT, {"echo": True, "logprobs": 1, "stream": True}, "conflicting_parameters", "echo"),
    (TEXT, {"prompt_logprobs": 1, "stream": True}, "conflicting_parameters", "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": -1}, "integer_below_min_value", "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": 21}, "integer_above_max_value", "prompt_logprobs"),
    (CHAT, {"prompt_logprobs": True}, "invalid_type", "prompt_logprobs"),
    (TEXT, {"echo": "yes"}, "invalid_type", "echo"),
    (TEXT, {"suffix": "end"}, "unsupported_parameter", "suffix"),
    (TEXT, {"logprobs": 6}, "integer_above_max_value", "logprobs"),
    (TEXT, {"logprobs": True}, "invalid_type", "logprobs"),
    (CHAT, {"logprobs": 1}, "invalid_type", "logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "integer_above_max_value", "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "integer_below_min_value", "top_logprobs"),
    (CHAT, {"top_logprobs": 1}, "conflicting_parameters", "top_logprobs"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1}, "conflicting_parameters", "max_completion_tokens"),
    (CHAT, {"max_completion_tokens": 0}, "integer_below_min_value", "max_completion_tokens"),
    (CHAT, {"max_tokens": 0}, "integer_below_min_value", "max_tokens"),
    (CHAT, {"max_tokens": -1}, "integer_below_min_value", "max_tokens"),
    (CHAT, {"max_tokens": 1.5}, "invalid_type", "max_tokens"),
    (CHAT, {"max_tokens": "10"}, "invalid_type", "max_tokens"),
    (CHAT, {"max_tokens": True}, "invalid_type", "max_tokens"),
    (CHAT, {"max_tokens": 2**63}, "context_length_exceeded", "messages"),
    (CHAT, {"min_tokens": -1}, "integer_below_min_value", "min_tokens"),
    (CHAT, {"min_tokens": 5, "max_tokens": 4}, "integer_above_max_value", "min_tokens"),
    (CHAT, {"temperature": -0.1}, "decimal_below_min_value", "temperature"),
    (CHAT, {"temperature": 2.1}, "decimal_above_max_value", "temperature"),
    (CHAT, {"temperature": "hot"}, "invalid_type", "temperature"),
    (CHAT, {"top_p": 0}, "decimal_below_min_value", "top_p"),
    (CHAT, {"top_p": -1}, "decimal_below_min_value", "top_p"),
    (CHAT, {"top_p": 1.01}, "decimal_above_max_value", "top_p"),
    (CHAT, {"top_k": -2}, "integer_below_min_value", "top_k"),
    (CHAT, {"top_k": 1.5}, "invalid_type", "top_k"),
    (CHAT, {"min_p": 1.1}, "decimal_above_max_value", "min_p"),
    (CHAT, {"presence_penalty": 2.1}, "decimal_above_max_value", "presence_penalty"),
    (CHAT, {"frequency_penalty": -2.1}, "decimal_below_min_value", "frequency_penalty"),
    (CHAT, {"repetition_penalty": 0}, "decimal_below_min_value", "repetition_penalty"),
    (CHAT, {"n": 0}, "integer_below_min_value", "n"),
    (CHAT, {"n": 9}, "integer_above_max_value", "n"),
    (CHAT, {"n": 10**9}, "integer_above_max_value", "n"),
    (CHAT, {"n": "2"}, "invalid_type", "n"),
    (CHAT, {"seed": "x"}, "invalid_type", "seed"),
    (CHAT, {"seed": 1.5}, "invalid_type", "seed"),
    (CHAT, {"seed": 2**63}, "integer_above_max_value", "seed"),
    (CHAT, {"stop": ["a", "b", "c", "d", "e"]}, "array_above_max_length", "stop"),
    (CHAT, {"stop": ""}, "empty_string", "stop"),
    (CHAT, {"stop": "x" * 257}, "string_above_max_length", "stop"),
    (CHAT, {"stop": [1]}, "invalid_type", "stop[0]"),
    (CHAT, {"stop": [["a"]]}, "invalid_type", "stop[0]"),
    (CHAT, {"stop_token_ids": [-1]}, "invalid_token_id", "stop_token_ids"),
    (CHAT, {"stop_token_ids": ["1"]}, "invalid_type", "stop_token_ids[0]"),
    (CHAT, {"allowed_token_ids": []}, "empty_array", "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [10**7]}, "invalid_token_id", "allowed_token_ids"),
    (CHAT, {"logit_bias": {"abc": 1}}, "invalid_token_id", "logit_bias"),
    (CHAT, {"logit_bias": {"-1": 1}}, "invalid_token_id", "logit_bias"),
    (CHAT, {"logit_bias": {"99999999": 1}}, "invalid_token_id", "logit_bias"),
    (CHAT, {"logit_bias": {"5": 101}}, "decimal_above_max_value", "logit_bias.5"),
    (CHAT, {"logit_bias": {"5": "1"}}, "invalid_type", "logit_bias.5"),
    (CHAT, {"logit_bias": [1]}, "invalid_type", "logit_bias"),
    (CHAT, {"logit_bias": {str(i): 1 for i in range(301)}}, "array_above_max_length", "logit_bias"),
    (CHAT, {"bad_words": "x"}, "invalid_type", "bad_words"),
    (CHAT, {"stream": "true"}, "invalid_type", "stream"),
    (CHAT, {"stream": 1}, "invalid_type", "stream"),
    (CHAT, {"stream_options": {"include_usage": True}}, "conflicting_parameters", "stream_options"),
    (CHAT, {"stream": True, "stream_options": 5}, "invalid_type", "stream_options"),
    (CHAT, {"stream": True, "stream_options": {"include_usage": 1}}, "invalid_type",
     "stream_options.include_usage"),
    (CHAT, {"response_format": 5}, "invalid_type", "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "invalid_value", "response_format"),
    (CHAT, schema(5), "invalid_json_schema", SCHEMA),
    (CHAT, schema({"$ref": "http://x/y"}), "invalid_json_schema", SCHEMA),
    (CHAT, schema(nested(70)), "grammar_too_complex", SCHEMA),
    (CHAT, schema({"properties": {f"p{i}": {} for i in range(6000)}}), "grammar_too_complex", SCHEMA),
    (CHAT, schema({"not": {}}, strict=True), "invalid_value", SCHEMA),
    (TEXT, {"structured_outputs": {}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "invalid_value", "structured_outputs"),
    (TEXT, {"structured_outputs": {"choice": []}}, "invalid_value", "structured_outputs.choice"),
    (TEXT, {"structured_outputs": {"regex": "a" * 5000}}, "grammar_too_complex", "structured_outputs.regex"),
    (TEXT, {"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "conflicting_parameters", "min_tokens"),
    (TEXT, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "conflicting_parameters", "structured_outputs"),
    (CHAT, {"tools": [TOOL]}, "unsupported_parameter", "tools"),
    (CHAT, {"tools": {}}, "invalid_type", "tools"),
    (CHAT, {"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter",
     "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "invalid_value",
     "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "unsupported_parameter", "tools"),
    (CHAT, {"tools": [TOOL, TOOL]}, "conflicting_parameters", "tools"),
    (CHAT, {"tools": [TOOL] * 129}, "array_above_max_length", "tools"),
    (CHAT, {"tool_choice": "required"}, "conflicting_parameters", "tool_choice"),
    (CHAT, {"tool_choice": "always"}, "invalid_value", "tool_choice"),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "conflicting_parameters", "tool_choice"),
    (CHAT, {"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "unsupported_parameter", "chat_template_kwargs"),
    (CHAT, {"modalities": ["audio"]}, "unsupported_parameter", "modalities"),
    (CHAT, {"priority": "high"}, "invalid_type", "priority"),
    (CHAT, {"user": 5}, "invalid_type", "user"),
    (CHAT, {"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
    (CHAT, {"speculation": True}, "invalid_type", "speculation"),
    (CHAT, {"speculation": []}, "invalid_type", "speculation"),
    (CHAT, {"speculation": {"enabled": "no"}}, "invalid_type", "speculation.enabled"),
    (CHAT, {"speculation": {"enabled": 0}}, "invalid_type", "speculation.enabled"),
    (CHAT, {"speculation": {"enable": False}}, "unknown_parameter", "speculation.enable"),
    (CHAT, {"speculation": {"max_draft_tokens": -1}}, "integer_below_min_value",
     "speculation.max_draft_tokens"),
    (TEXT, {"speculation": {"max_draft_tokens": "4"}}, "invalid_type", "speculation.max_draft_tokens"),
    (TEXT, {"speculation": {"max_draft_tokens": 1.5}}, "invalid_type", "speculation.max_draft_tokens"),
    (TEXT, {"speculation": {"max_draft_tokens": 2**63}}, "integer_above_max_value",
     "speculation.max_draft_tokens"),
    (TEXT, {"speculation": {"report": 1}}, "invalid_type", "speculation.report"),
    (TEXT, {"speculation": {"report": True}, "n": 2}, "conflicting_parameters", "speculation.report"),
    (TEXT, {"speculation": {"report": True}, "prompt": ["a", "b"]}, "conflicting_parameters",
     "speculation.report"),
    (CHAT, {"cache_salt": 5}, "invalid_type", "cache_salt"),
    (CHAT, {"cache_salt": ""}, "invalid_value", "cache_salt"),
    (CHAT, {"cache_salt": "a b"}, "invalid_value", "cache_salt"),
    (CHAT, {"cache_salt": "salt\n"}, "invalid_value", "cache_salt"),
    (CHAT, {"cache_salt": "\u00e9"}, "invalid_value", "cache_salt"),
    (CHAT, {"cache_salt": "s" * 65}, "invalid_value", "cache_salt"),
]  # fmt: skip


def assert_refused(response: httpx.Response, status: int, code: str, param: str | None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param), error
    assert (
        param is None or param in error["message"] or code == "model_not_found" or code == "invalid_messages"
    )
    assert len(response.content) < 1000


@pytest.mark.parametrize(("path", "changes", "code", "param"), FIELDS, ids=lambda v: str(v)[:40])
def test_fields(served, path: str, changes: dict[str, Any], code: str, param: str | None) -> None:
    client, engine = served
    num_asked = len(engine.params)
    body = {name: value for name, value in {**good(path), **changes}.items() if value is not OMIT}
    assert_refused(client.post(path, json=body), 400, code, param)
    assert len(engine.params) == num_asked, "it reached the engine"
    assert client.post(path, json=good(path)).status_code == 200


# bytes of the body, status, code
BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b'{"model": "m"} x', 400, "invalid_json"),
    (b"[]", 400, "invalid_type"),
    (b'"hi"', 400, "invalid_type"),
    (b"null", 400, "invalid_type"),
    (b'{"model": "\xff"}', 400, "invalid_encoding"),
    (b'{"temperature": NaN}', 400, "invalid_json"),
    (b'{"temperature": Infinity}', 400, "invalid_json"),
    (b'{"temperature": 1e400}', 400, "invalid_json"),
    (b'{"n": 1, "n": 2}', 400, "duplicate_key"),
    (b"[" * 10000 + b"]" * 10000, 400, "json_too_deep"),
    (b'{"a":' * 100000 + b"1" + b"}" * 100000, 400, "json_too_deep"),
    (b"1" * 10000, 400, "invalid_json"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("body", "status", "code"), BODIES, ids=lambda v: str(v)[:20])
def test_bodies(served, path: str, body: bytes, status: int, code: str) -> None:
    response = served[0].post(path, content=body, headers={"content-type": "application/json"})
    assert_refused(response, status, code, None)
    assert served[0].post(path, json=good(path)).status_code == 200


def test_a_lone_surrogate_is_refused_and_nul_is_text(served) -> None:
    client, _ = served
    headers = {"content-type": "application/json"}
    for field in ("content", "stop", "user"):
        body = json.dumps(
            {**good(CHAT), **({field: "\ud800"} if field != "content" else with_content("\ud800"))}
        )
        assert_refused(client.post(CHAT, content=body, headers=headers), 400, "invalid_encoding", None)
    raw = b'{"model": "m", "prompt": "\xed\xa0\x80"}'
    assert_refused(client.post(TEXT, content=raw, headers=headers), 400, "invalid_encoding", None)
    pair = json.dumps({**good(CHAT), **with_content("\U0001f98a")})
    assert "\\ud83e" in pair
    assert client.post(CHAT, content=pair, headers=headers).status_code == 200
    assert client.post(CHAT, json={**good(CHAT), **with_content("a\0b")}).status_code == 200


def test_transport(served) -> None:
    client, _ = served
    text = json.dumps(good(CHAT))
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {},
    ):
        assert_refused(client.post(CHAT, content=text, headers=headers), 415, "unsupported_media_type", None)
    packed = {"content-type": "application/json", "content-encoding": "gzip"}
    assert_refused(client.post(CHAT, content=text, headers=packed), 415, "unsupported_media_type", None)
    charset = {"content-type": "application/json; charset=utf-8"}
    assert client.post(CHAT, content=text, headers=charset).status_code == 200
    assert_refused(client.get("/v1/foo"), 404, "unknown_url", None)
    response = client.get(CHAT)
    assert_refused(response, 405, "method_not_allowed", None)
    assert response.headers["allow"] == "POST"
    assert_refused(
        client.post(CHAT, json={**good(CHAT), "model": "../../etc"}), 404, "model_not_found", "model"
    )


def test_unknown_fields_nulls_and_harmless_values_are_accepted(served) -> None:
    harmless = {
        "foo": {"bar": 1}, "tools": [], "tool_choice": "none", "response_format": {"type": "text"},
        "temperature": None, "user": "me", "metadata": {"a": "b"}, "n": None, "stop": None,
        "logit_bias": None, "service_tier": "auto", "store": False, "stream_options": None,
        "max_tokens": None, "speculation": None, "cache_salt": None,
    }  # fmt: skip
    assert served[0].post(CHAT, json={**good(CHAT), **harmless}).status_code == 200
    names = ("tools", "tool_choice", "response_format", "structured_outputs", "chat_template_kwargs")
    assert served[0].post(CHAT, json={**good(CHAT), **dict.fromkeys(names)}).status_code == 200


def test_mutations_never_break_the_server(served) -> None:
    """Valid requests with random fields replaced by random values: 200 or 4xx, never 5xx."""
    client, _ = served
    draw = random.Random(7)
    values: list[Any] = [
        None, True, False, 0, -1, 1, 2**63, 1.5, -1e300, "", "x", "\x00", [], [None], [[]], {}, {"a": None},
        ["a", 1], [1, 2], {"type": "text"}, [{"role": "user", "content": "hi"}], {"1": 1}, "x" * 300,
    ]  # fmt: skip
    fields = [
        "model", "messages", "prompt", "n", "stream", "stream_options", "max_tokens", "min_tokens",
        "temperature", "top_p", "top_k", "min_p", "presence_penalty", "repetition_penalty", "logit_bias",
        "bad_words", "allowed_token_ids", "stop", "stop_token_ids", "ignore_eos", "seed", "priority", "user",
        "metadata", "echo", "logprobs", "best_of", "top_logprobs", "tools", "response_format",
        "max_completion_tokens", "speculation", "cache_salt",
    ]  # fmt: skip
    for _ in range(600):
        path = draw.choice([CHAT, TEXT])
        changes = {draw.choice(fields): draw.choice(values) for _ in range(draw.randint(1, 3))}
        response = client.post(path, json={**good(path), **changes})
        assert response.status_code == 200 or 400 <= response.status_code < 500, (changes, response.text)
