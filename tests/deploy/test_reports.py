"""`metrics.speculative_decoding` of an answer: who gets it, and where in a stream it stands.

The scripted engine gives five tokens a step; from the second step on four of them were drafted, and two more
drafts did not stand.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import MODEL, listening, scripted_front

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 17, "ignore_eos": True}
SUMMARY: dict[str, Any] = {
    "mean_acceptance_length": 1 + 9 / 3,
    "draft_acceptance_rate": 9 / 15,
    "acceptance_histogram": [0, 1, 0, 0, 2, 0, 0],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 9,
    "num_draft_tokens": 15,
    "num_spec_tokens": 6,
}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox?"}]}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    engine.tokens_per_step, engine.num_rejected = 5, 2
    with listening(front) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_none_unless_asked_for(client: httpx.Client) -> None:
    for speculation in (None, {"report": False}):
        body = {**BODY, "speculation": speculation}
        assert "metrics" not in client.post("/v1/completions", json=body).json()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_one_that_was_asked_for(client: httpx.Client, path: str) -> None:
    body = {**BODY, **CHAT, "speculation": {"report": True}}
    reply = client.post(path, json=body).json()
    assert reply["metrics"] == {"speculative_decoding": SUMMARY}


@pytest.mark.parametrize("has_usage", [False, True])
def test_the_last_chunk_of_a_stream_has_it(client: httpx.Client, has_usage: bool) -> None:
    body = {**BODY, "speculation": {"report": True}, "stream": True}
    if has_usage:
        body["stream_options"] = {"include_usage": True}
    *chunks, last, done = events(client.post("/v1/completions", json=body))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["metrics"] == {"speculative_decoding": SUMMARY}
    assert ("usage" in last) == has_usage
    assert not any("metrics" in chunk for chunk in chunks)


def test_a_request_without_drafts_has_an_empty_one(client: httpx.Client) -> None:
    body = {**BODY, "max_tokens": 3, "speculation": {"report": True}}
    report = client.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
    assert report["acceptance_histogram"] == [0]
    assert (report["mean_acceptance_length"], report["num_spec_steps"]) == (1.0, 0)


def test_a_server_that_always_reports(tmp_path: Path) -> None:
    front, scripted = scripted_front(tmp_path)
    front = replace(front, served=replace(front.served, report="detailed"))
    scripted.tokens_per_step, scripted.num_rejected = 5, 2
    detailed = SUMMARY | {"per_step_accepted": [4, 4, 1], "per_step_drafted": [6, 6, 3]}
    stream: dict[str, Any] = {**BODY, "stream": True}
    with listening(front) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for speculation in (None, {"report": True}):
            body = {**BODY, "speculation": speculation}
            reply = client.post("/v1/completions", json=body).json()
            assert reply["metrics"] == {"speculative_decoding": detailed}
        for quiet in ({"speculation": {"report": False}}, {"n": 2}):
            reply = client.post("/v1/completions", json={**BODY, **quiet}).json()
            assert "metrics" not in reply
        # a client that asked for nothing gets no chunk without choices
        *chunks, _ = events(client.post("/v1/completions", json=stream))
        assert all(chunk["choices"] for chunk in chunks)
        stream["stream_options"] = {"include_usage": True}
        usage = events(client.post("/v1/completions", json=stream))[-2]
        assert usage["metrics"] == {"speculative_decoding": detailed}
