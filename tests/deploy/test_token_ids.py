"""Token ids in answers, and prompts that are cut to so many of them, over a real socket."""

from typing import Any

import httpx
import pytest
from front import MAX_MODEL_LEN, MODEL, ScriptedEngine, events


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "the fox?"}], **fields}


def ids_told(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """The prompt's ids and those of each choice, as a whole answer tells them."""
    reply = http.post(path, json={**body, "return_token_ids": True}).json()
    of_prompt = {
        tuple(place["prompt_token_ids"])
        for place in (reply, *reply["choices"])
        if "prompt_token_ids" in place
    }
    assert len(of_prompt) == 1
    ids = [choice["token_ids"] for choice in reply["choices"]]
    assert reply["usage"]["completion_tokens"] == sum(map(len, ids))
    return list(of_prompt.pop()), ids


@pytest.mark.parametrize("tokens_per_step", [1, 3])
@pytest.mark.parametrize("fields", [{}, {"n": 2, "stop": "ox say"}, {"max_tokens": 5, "logprobs": 1}])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_token_ids_are_told_where_vllm_tells_them(
    http: httpx.Client, engine: ScriptedEngine, path: str, fields: dict[str, Any], tokens_per_step: int
) -> None:
    engine.tokens_per_step = tokens_per_step
    is_chat = path != "/v1/completions"
    if is_chat and "logprobs" in fields:
        fields = {**fields, "logprobs": True}
    body = chat(**fields) if is_chat else {"model": MODEL, "prompt": "the fox?", **fields}
    prompt_ids, ids = ids_told(http, path, body)
    assert prompt_ids == engine.prompts[-1]
    text = http.post("/detokenize", json={"tokens": ids[0]}).json()["prompt"]
    whole = http.post(path, json=body).json()["choices"][0]
    assert text.startswith(whole["message"]["content"] if is_chat else whole["text"])

    streamed: list[list[int]] = [[] for _ in ids]
    prompts: list[Any] = []
    for chunk in events(http.post(path, json={**body, "stream": True, "return_token_ids": True}))[:-1]:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice.get("token_ids", [])
        prompts += [place["prompt_token_ids"] for place in (chunk, choice) if "prompt_token_ids" in place]
    assert streamed == ids
    assert prompts == [prompt_ids] * len(ids)


def test_a_prompt_is_cut_where_its_request_says(http: httpx.Client, engine: ScriptedEngine) -> None:
    ids = list(range(3, 303))
    body = {"model": MODEL, "max_tokens": 6}
    for fields, kept in (
        ({"truncate_prompt_tokens": 10}, ids[-10:]),
        ({"truncate_prompt_tokens": 10, "truncation_side": "right"}, ids[:10]),
        ({"truncate_prompt_tokens": -1}, ids[-(MAX_MODEL_LEN - 6) :]),
    ):
        reply = http.post("/v1/completions", json={**body, "prompt": ids, **fields})
        assert reply.status_code == 200, reply.text
        assert engine.prompts[-1] == kept
        assert reply.json()["usage"]["prompt_tokens"] == len(kept)
    echoed = {**body, "prompt": "the quick brown fox", "truncate_prompt_tokens": 2, "echo": True}
    text = http.post("/v1/completions", json=echoed).json()["choices"][0]["text"]
    assert text.startswith(http.post("/detokenize", json={"tokens": engine.prompts[-1]}).json()["prompt"])
    assert len(engine.prompts[-1]) == 2
    assert http.post("/v1/chat/completions", json=chat(truncate_prompt_tokens=4)).status_code == 200
    assert len(engine.prompts[-1]) == 4
