"""What a stream tells of its steps when it is asked to: which tokens were drafted, and what each says.

The scripted engine gives five tokens a step; from the second step on four of them were drafted, and two more
drafts did not stand.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from front import MODEL, listening, scripted_front

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the fox?"}],
    "max_tokens": 17,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    front, engine = scripted_front(tmp_path_factory.mktemp("model"))
    engine.tokens_per_step, engine.num_rejected = 5, 2
    engine.script = "the fox says 🦊🦊 and goes on"  # a fox takes several tokens
    with listening(front) as url, httpx.Client(base_url=url, trust_env=False) as http:
        yield http


def chunks(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    reply = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert reply.status_code == 200, reply.text
    *events, done, end = reply.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content(stream: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in stream for choice in chunk["choices"])


def test_each_step_is_told_behind_its_text(client: httpx.Client) -> None:
    stream = chunks(client, speculation={"steps": True})
    steps = [chunk["speculation"] for chunk in stream if "speculation" in chunk]
    assert [(s["num_drafts"], s["num_accepted"]) for s in steps] == [(0, 0), (6, 4), (6, 4), (3, 1)]
    assert "".join(text for step in steps for text in step["texts"]) == content(stream)
    usage = stream[-1]["usage"]
    assert [s["context_len"] for s in steps] == [usage["prompt_tokens"] + n for n in (5, 10, 15, 17)]
    assert all(chunk["choices"] == [] for chunk in stream if "speculation" in chunk)


def test_nobody_else_meets_such_a_chunk(client: httpx.Client) -> None:
    for speculation in (None, {"steps": False}, {"report": True}):
        stream = chunks(client, speculation=speculation)
        assert not any("speculation" in chunk for chunk in stream)
        assert content(stream) == content(chunks(client, speculation={"steps": True}))


@pytest.mark.parametrize("stop", ["🦊", "fox says", "zebra"])
def test_a_stop_string_ends_both(client: httpx.Client, stop: str) -> None:
    plain = chunks(client, stop=[stop])
    told = chunks(client, stop=[stop], speculation={"steps": True})
    texts = [text for chunk in told for text in chunk.get("speculation", {}).get("texts", [])]
    assert "".join(texts) == content(told) == content(plain)
    assert told[-1]["usage"] == plain[-1]["usage"]


def test_every_choice_has_its_own(client: httpx.Client) -> None:
    stream = chunks(client, n=2, speculation={"steps": True})
    for index in (0, 1):
        steps = [c["speculation"] for c in stream if c.get("speculation", {}).get("index") == index]
        assert [s["num_accepted"] for s in steps] == [0, 4, 4, 1]
        assert steps[-1]["context_len"] == stream[-1]["usage"]["prompt_tokens"] + 17


def test_an_answer_in_one_piece_has_no_steps(client: httpx.Client) -> None:
    body = {**CHAT, "stream": False, "stream_options": None, "speculation": {"steps": True}}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "speculation.steps"
