"""The HTTP surface over a real socket, with scripted tokens: routes, headers, streams and how they fail."""

import socket
import struct
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from front import MODEL, ScriptedEngine, events

from paceline.cluster.errors import EngineError, RequestError


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "the fox?"}], **fields}


def assert_error(
    response: httpx.Response, status: int, code: str, param: str | None = None
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["param"] == param
    return error


def test_a_chat_completion(http: httpx.Client) -> None:
    reply = http.post("/v1/chat/completions", json=chat()).json()
    assert reply["choices"][0]["message"]["content"] == "the fox says 🦊 and goes on"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert (
        reply["usage"]["total_tokens"]
        == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    )


def test_a_stream_starts_with_the_role_and_ends_with_usage_and_done(http: httpx.Client) -> None:
    body = chat(stream=True, stream_options={"include_usage": True})
    response = http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 5
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "the fox says 🦊 and goes on"
    assert all("\ufffd" not in delta.get("content", "") for delta in deltas)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)


def test_without_include_usage_no_chunk_has_usage(http: httpx.Client) -> None:
    chunks = events(http.post("/v1/chat/completions", json=chat(stream=True)))[:-1]
    assert not any("usage" in chunk for chunk in chunks)


def _text(response: httpx.Response) -> str:
    return response.json()["choices"][0]["text"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_text_and_usage(
    http: httpx.Client, engine: ScriptedEngine, stream: bool, tokens_per_step: int
) -> None:
    engine.tokens_per_step = tokens_per_step
    body = {"model": MODEL, "prompt": "x", "stop": ["ox say", "never"], "stream": stream, "max_tokens": 50}
    if stream:
        body["stream_options"] = {"include_usage": True}
        *chunks, usage, _ = events(http.post("/v1/completions", json=body))
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        reason, num_tokens = chunks[-1]["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]
    else:
        reply = http.post("/v1/completions", json=body).json()
        text, reason = reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]
        num_tokens = reply["usage"]["completion_tokens"]
    assert (text, reason) == ("the f", "stop")
    shown = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True})
    whole = "".join(c["choices"][0]["text"] for c in events(shown)[:-2]) if stream else _text(shown)
    assert whole == "the fox say"
    shortest = next(
        n
        for n in range(1, 50)
        if "ox say"
        in http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": n}).json()[
            "choices"
        ][0]["text"]
    )
    assert num_tokens == shortest
    assert not engine.live


def test_stop_strings_wait_for_min_tokens(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "stop": "t", "min_tokens": 3}
    text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert text.startswith("th")


def test_max_tokens_ends_with_length_and_never_half_a_character(http: httpx.Client) -> None:
    for max_tokens in range(1, 20):
        body = {"model": MODEL, "prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        *chunks, _ = events(http.post("/v1/completions", json=body))
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert all("\ufffd" not in chunk["choices"][0]["text"] for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_two_choices_of_two_prompts(http: httpx.Client, engine: ScriptedEngine, stream: bool) -> None:
    engine.params.clear()
    body = {"model": MODEL, "prompt": ["the", "fox"], "n": 2, "echo": True, "seed": 5, "stream": stream}
    response = http.post("/v1/completions", json=body)
    texts = ["", "", "", ""]
    if stream:
        for chunk in events(response)[:-1]:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    else:
        for choice in response.json()["choices"]:
            texts[choice["index"]] = choice["text"]
    assert texts == [f"{prompt}the fox says 🦊 and goes on" for prompt in ("the", "the", "fox", "fox")]
    seeds = [params.seed for params in engine.params]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


def test_chat_logprobs(http: httpx.Client) -> None:
    body = chat(logprobs=True, top_logprobs=2, max_tokens=20)
    reply = http.post("/v1/chat/completions", json=body).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in content).decode()
        == reply["choices"][0]["message"]["content"]
    )
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}))[1:-2]
    assert [entry for chunk in chunks for entry in chunk["choices"][0]["logprobs"]["content"]] == content


def test_completion_logprobs(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x", "logprobs": 1, "max_tokens": 4}
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(4)]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]
    chunks = events(http.post("/v1/completions", json={**body, "stream": True}))[:-1]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert [offset for piece in offsets for offset in piece] == logprobs["text_offset"]


def test_where_the_prompt_of_a_chat_ends(http: httpx.Client, engine: ScriptedEngine) -> None:
    said = [{"role": "user", "content": "the fox?"}, {"role": "assistant", "content": "it <|im_end|> goes"}]

    def prompt(**fields: Any) -> list[int]:
        reply = http.post("/v1/chat/completions", json={"model": MODEL, "messages": said, **fields})
        assert reply.status_code == 200, reply.text
        counted = http.post("/tokenize", json={"messages": said, **fields}).json()
        assert counted["tokens"] == engine.prompts[-1]
        return engine.prompts[-1]

    opened, closed = prompt(), prompt(add_generation_prompt=False)
    continued = prompt(continue_final_message=True)
    assert opened[: len(closed)] == closed
    assert closed[: len(continued)] == continued
    text = http.post("/detokenize", json={"tokens": continued}).json()["prompt"]
    assert text.endswith("it <|im_end|> goes")  # what a client wrote is text, whatever it looks like
    for fields in (
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": True, "messages": said[:1]},
    ):
        body = {"model": MODEL, "messages": said, **fields}
        assert http.post("/v1/chat/completions", json=body).status_code == 400


def test_a_prompt_s_own_logprobs(http: httpx.Client, engine: ScriptedEngine) -> None:
    text = {"model": MODEL, "prompt": ["the quick fox", [5, 6, 7, 8]], "max_tokens": 3, "n": 2}
    choices = http.post("/v1/completions", json={**text, "prompt_logprobs": 1}).json()["choices"]
    prompts = [engine.prompts[-4], engine.prompts[-4], [5, 6, 7, 8], [5, 6, 7, 8]]
    for choice, ids in zip(choices, prompts, strict=True):
        none, *told = choice["prompt_logprobs"]
        assert none is None
        assert [next(iter(entry)) for entry in told] == [str(i) for i in ids[1:]]
        assert all(entry[str(i)]["logprob"] == -0.5 for entry, i in zip(told, ids[1:], strict=True))
    echoed = http.post("/v1/completions", json={**text, "echo": True, "logprobs": 1}).json()["choices"][0]
    logprobs = echoed["logprobs"]
    assert "prompt_logprobs" not in echoed
    assert "".join(logprobs["tokens"]) == echoed["text"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(logprobs["tokens"]) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:])
    reply = http.post("/v1/chat/completions", json=chat(prompt_logprobs=0, max_tokens=3)).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]


def test_token_id_prompts_and_sampling_parameters_reach_the_engine(
    http: httpx.Client, engine: ScriptedEngine
) -> None:
    body = {
        "model": MODEL, "prompt": [5, 6, 7], "temperature": 0, "top_k": -1, "top_p": 0.5, "min_p": 0.1,
        "logit_bias": {"7": -100}, "bad_words": ["fox"], "allowed_token_ids": [3, 4],
        "stop_token_ids": [9],
        "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 2, "seed": -1,
        "max_tokens": 3,
    }  # fmt: skip
    assert http.post("/v1/completions", json=body).status_code == 200
    params = engine.params[-1]
    assert engine.prompts[-1] == [5, 6, 7]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0, 0, 0.5, 0.1)
    assert params.logit_bias == {7: -100}
    assert params.allowed_token_ids == [3, 4]
    assert params.stop_token_ids[0] == 9
    assert len(params.stop_token_ids) == 2
    assert len(params.bad_words) == 2
    assert params.seed == 2**64 - 1
    assert params.max_tokens == 3


@pytest.mark.parametrize(
    ("speculation", "limit"),
    [
        (None, None),
        ({}, None),
        ({"enabled": True}, None),
        ({"enabled": True, "max_draft_tokens": 3}, 3),
        ({"max_draft_tokens": 0}, 0),
        ({"enabled": False}, 0),
        ({"enabled": False, "max_draft_tokens": 3}, 0),
    ],
)
def test_the_draft_limit_and_the_salt_reach_the_engine(
    http: httpx.Client, engine: ScriptedEngine, speculation: dict[str, Any] | None, limit: int | None
) -> None:
    salt = None if limit is None else f"tenant-{limit}"
    body = chat(speculation=speculation, cache_salt=salt)
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert engine.draft_limits[-1] == limit
    assert engine.salts[-1] == (salt or "")


def test_a_prompt_s_cached_tokens_are_counted_once(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.num_cached_tokens = 2
    body = {"model": MODEL, "prompt": [[5, 6, 7], [8, 9, 3, 4]], "n": 3, "max_tokens": 4}
    usage = http.post("/v1/completions", json=body).json()["usage"]
    assert usage["prompt_tokens"] == 7
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    assert events(http.post("/v1/completions", json=streamed))[-2]["usage"] == usage


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert [entry["id"] for entry in listed["data"]] == [MODEL]
    assert http.get(f"/v1/models/{MODEL}").json() == listed["data"][0]
    assert_error(http.get("/v1/models/other"), 404, "model_not_found", "model")


def test_health(http: httpx.Client, engine: ScriptedEngine) -> None:
    assert http.get("/health").status_code == 200
    engine.health = EngineError("rank 0 is gone")
    error = assert_error(http.get("/health"), 503, "engine_unavailable")
    assert "rank 0 is gone" in error["message"]


def test_a_refusal_has_its_status_even_for_a_stream(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.fails_at = 0
    engine.failure = RequestError(
        "the queue is full",
        status=429,
        code="rate_limit_exceeded",
        error_type="rate_limit_error",
        retry_after_s=2,
    )
    for stream in (False, True):
        response = http.post("/v1/chat/completions", json=chat(stream=stream))
        assert_error(response, 429, "rate_limit_exceeded")
        assert response.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (EngineError("a rank died"), 503, "engine_unavailable"),
        (RuntimeError("/secret/path"), 500, "internal_error"),
    ],
)
def test_a_failure_in_the_middle(
    http: httpx.Client, engine: ScriptedEngine, failure: Exception, status: int, code: str
) -> None:
    engine.fails_at, engine.failure = 3, failure
    assert_error(http.post("/v1/chat/completions", json=chat()), status, code)
    response = http.post("/v1/chat/completions", json=chat(stream=True))
    assert response.status_code == 200
    last = events(response)[-1]
    assert last["error"]["code"] == code.replace("unavailable", "failure")
    assert "secret" not in response.text


def test_a_client_that_leaves_within_its_body_is_no_failure(
    served: tuple[str, ScriptedEngine], caplog: pytest.LogCaptureFixture
) -> None:
    parts = urlsplit(served[0])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
        connection.sendall(head + b"Content-Length: 99\r\n\r\n{")
        time.sleep(0.1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert httpx.get(f"{served[0]}/health", trust_env=False).status_code == 200
    assert "a request failed" not in caplog.text


def test_a_stream_may_tell_its_usage_all_the_way(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = events(
        http.post("/v1/chat/completions", json=chat(stream=True, stream_options=options))
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert chunks[-1]["usage"] == last["usage"]
