"""The whole house: `paceline serve` with the real model on Ray Serve, asked by OpenAI's client.

With OPENAI_SCHEMAS, the path of schemas from OpenAI's OpenAPI document, answers are validated against them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import grpc
import httpx
import jsonschema
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from paceline.deploy.grpc import paceline_pb2 as pb
from paceline.deploy.grpc.paceline_pb2_grpc import PacelineStub
from paceline.deploy.grpc.service import SERVICE

MODEL = "SmolLM2-135M-Instruct"
START_S = 240.0  # generous: the suite may share its cores
STOP_S = 60.0
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With a cache of its own, where commands find this server and no other."""
    return {**os.environ, "PACELINE_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """For HTTP and for gRPC."""
    with socket.create_server(("127.0.0.1", 0)) as http, socket.create_server(("127.0.0.1", 0)) as rpc:
        return http.getsockname()[1], rpc.getsockname()[1]


@pytest.fixture(scope="module")
def url(
    default_model: Path,
    environ: dict[str, str],
    ports: tuple[int, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """A server's URL; afterwards every process it started must be gone."""
    port, grpc_port = ports
    log = tmp_path_factory.mktemp("server") / "log"
    options = f"--port {port} --served-model-name {MODEL} --num-threads 1 --kv-cache-gib 0.5 --dtype float32"
    options += f" --grpc-port {grpc_port}"
    options += " --no-draft-budget"  # what is drafted must not depend on how fast this machine is
    command = [sys.executable, "-m", "paceline.deploy", "serve", str(default_model), *options.split()]
    with log.open("wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environ)
    try:
        _wait_until_ready(server, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
        family = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(signal.SIGINT)
        assert server.wait(STOP_S) == 0, log.read_text()
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, alive
    finally:
        if server.poll() is None:
            for process in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
                process.kill()
            server.wait()


def _wait_until_ready(server: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"no answer within {START_S:.0f} s: {log.read_text()}")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as it:
        yield it


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    """OpenAI's schemas as JSON Schema, to which `nullable` and `discriminator` mean nothing."""
    file = os.environ.get("OPENAI_SCHEMAS")
    if not file:
        pytest.skip("OPENAI_SCHEMAS does not name a file of OpenAI's schemas")
    return _json_schema(json.loads(Path(file).read_text()))


def _json_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key not in ("nullable", "discriminator")}
    converted = {key: _json_schema(value) for key, value in kept.items()}
    return {"anyOf": [converted, {"type": "null"}]} if node.get("nullable") is True else converted


def valid(schemas: dict[str, Any], name: str, reply: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", **schemas}
    jsonschema.Draft202012Validator(schema).validate(reply)


def metrics(url: str) -> dict[str, float]:
    shown = httpx.get(f"{url}/metrics", trust_env=False).text
    return {line.split("{")[0]: float(line.split()[-1]) for line in shown.splitlines() if line[0] != "#"}


def assert_idle(url: str) -> None:
    """Soon nothing runs and every page is free; heartbeats come once a second."""
    deadline = time.monotonic() + 10
    while True:
        numbers = metrics(url)
        is_idle = numbers["vllm:num_requests_running"] + numbers["vllm:num_requests_waiting"] == 0
        if is_idle and numbers["paceline:num_free_pages"] == numbers["paceline:num_pages"] > 0:
            return
        assert time.monotonic() < deadline, numbers
        time.sleep(0.1)


def test_a_sensible_reply(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=30)
    assert "Paris" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage


def test_other_apis_say_the_same(client: openai.OpenAI, url: str) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    response = client.responses.create(
        model=MODEL, input=QUESTION[0]["content"], temperature=0, max_output_tokens=24
    )
    with (
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other,
        other.messages.stream(
            model=MODEL, messages=QUESTION, max_tokens=24, extra_body={"temperature": 0}
        ) as stream,
    ):
        text = "".join(stream.text_stream)
    assert chat.choices[0].message.content == response.output_text == text


def test_a_prompt_s_own_logprobs_are_told(client: openai.OpenAI) -> None:
    said = client.completions.create(
        model=MODEL,
        prompt="The capital of France is Paris",
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
    )
    logprobs = said.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    first, *told = logprobs.token_logprobs
    assert first is None
    assert told[-2] > -4  # of Paris
    assert all(logprob <= 0 for logprob in told)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "paceline"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_text_completions_with_several_choices(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["Once upon", "In the"], n=2, max_tokens=8, seed=2, echo=True
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith("Once upon") for choice in reply.choices[:2])
    assert len({choice.text for choice in reply.choices}) == 4
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 32


def test_stop_strings_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=20,
        stop=" France",
        logprobs=True,
        top_logprobs=3,
    )
    choice = reply.choices[0]
    assert choice.message.content == "The capital of"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == ["The", " capital", " of", " France"]
    assert all(e.logprob == max(top.logprob for top in e.top_logprobs) for e in choice.logprobs.content)


def test_drafting_is_asked_for_and_reported_as_extra_fields(client: openai.OpenAI, url: str) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "red, green, blue, red, green, blue, red, green, blue, red,",
        "temperature": 0,
        "max_tokens": 24,
    }
    plain = client.completions.create(**asked, extra_body={"speculation": {"enabled": False}})
    extra = {"speculation": {"report": True, "max_draft_tokens": 3}, "cache_salt": "mine"}
    drafted = client.completions.create(**asked, extra_body=extra)
    assert drafted.choices[0].text == plain.choices[0].text
    assert drafted.model_extra is not None
    report = drafted.model_extra["metrics"]["speculative_decoding"]
    assert report["num_spec_tokens"] == 3
    assert report["mean_acceptance_length"] > 2
    with client.completions.create(**asked, extra_body=extra, stream=True) as stream:
        *_, last = stream
    assert last.choices == []
    assert last.model_extra is not None
    assert last.model_extra["metrics"]["speculative_decoding"] == report
    assert_idle(url)
    numbers = metrics(url)
    assert numbers["vllm:spec_decode_num_accepted_tokens_total"] >= 2 * report["num_accepted_draft_tokens"]


def test_the_drafter_is_swapped_by_a_command(
    client: openai.OpenAI, url: str, environ: dict[str, str]
) -> None:
    def swap(drafter: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "paceline.deploy", "drafter", "swap", drafter]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)
        # Ray may add lines about its own shutdown.
        return done.returncode, (done.stdout + done.stderr).partition("\n")[0]

    def num_drafts() -> int:
        extra = {"speculation": {"report": True}}
        reply = client.completions.create(
            model=MODEL, prompt="a, b, a, b, a, b, a,", temperature=0, max_tokens=12, extra_body=extra
        )
        assert reply.model_extra is not None
        return reply.model_extra["metrics"]["speculative_decoding"]["num_draft_tokens"]

    def is_ready() -> bool:
        return 'shard="0",state="ready"} 1.0' in httpx.get(f"{url}/metrics", trust_env=False).text

    assert num_drafts() > 0
    assert is_ready()
    assert swap("none") == (0, "drafting with none")
    assert num_drafts() == 0
    code, says = swap("./absent/drafter")
    assert code == 2
    assert "give none, ngram, a directory, or an id" in says
    assert swap("ngram") == (0, "drafting with ngram")
    assert num_drafts() > 0


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "A long prefix that two requests share: " + ", ".join(map(str, range(40)))
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
    usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


def test_emoji_never_break(client: openai.OpenAI) -> None:
    """The prompt leads the model into many-byte characters, and biased tokens into broken ones."""
    fire = "🔥🦊🎉" * 8
    with client.completions.create(
        model=MODEL, prompt=fire, temperature=0, max_tokens=24, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        pieces = [chunk.choices[0].text for chunk in stream]
    assert any(ord(character) > 0xFFFF for character in "".join(pieces))
    assert all("\ufffd" not in piece for piece in pieces[:-1])


def test_errors_reach_the_client_as_its_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    assert unknown.value.code == "model_not_found"
    assert unknown.value.response.headers["x-request-id"]
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=3)
    assert (hot.value.param, hot.value.code) == ("temperature", "decimal_above_max_value")
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="word " * 9000)
    assert long.value.code == "context_length_exceeded"


def test_a_client_that_leaves_is_cancelled(client: openai.OpenAI, url: str) -> None:
    assert_idle(url)
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 2000,
        "extra_body": {"ignore_eos": True},
    }
    with client.completions.create(**asked, stream=True) as stream:
        for _, _ in zip(stream, range(3), strict=False):
            pass
    assert_idle(url)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1.0).completions.create(**asked)
    assert_idle(url)


@pytest.fixture(scope="module")
def channel(url: str, ports: tuple[int, int]) -> Iterator[grpc.Channel]:
    del url  # there is a server
    with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as it:
        grpc.channel_ready_future(it).result(30)
        yield it


def code_of(error: grpc.RpcError) -> str:
    trailers: Any = error.trailing_metadata()
    return dict(trailers)["paceline-code"]


def test_grpc_says_what_http_says(client: openai.OpenAI, channel: grpc.Channel) -> None:
    stub = PacelineStub(channel)
    asked: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "seed": 3, "max_tokens": 12}
    over_http = client.completions.create(**asked)
    whole = stub.Generate(pb.GenerateRequest(**asked), timeout=60)
    *chunks, last = stub.GenerateStream(pb.GenerateRequest(**asked), timeout=60)
    assert whole.choices[0].text == over_http.choices[0].text == "".join(chunk.text for chunk in chunks)
    assert over_http.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens == over_http.usage.total_tokens
    with pytest.raises(grpc.RpcError) as hot:
        stub.Generate(pb.GenerateRequest(**asked, temperature=3), timeout=60)
    assert hot.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert code_of(hot.value) == "decimal_above_max_value"
    with pytest.raises(grpc.RpcError) as unknown:
        list(stub.GenerateStream(pb.GenerateRequest(model="gpt-4", prompt="x"), timeout=60))
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


def test_the_grpc_client_of_the_manual(
    channel: grpc.Channel,
    ports: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del channel  # there is a server
    manual = (Path(__file__).parents[2] / "docs" / "grpc.md").read_text()
    monkeypatch.setenv("PACELINE_GRPC", f"127.0.0.1:{ports[1]}")
    names: dict[str, Any] = {}
    exec(manual.partition("```python\n")[2].partition("```")[0], names)
    names["channel"].close()
    answer, refusal = capsys.readouterr().out.strip().rsplit("\n", 1)
    assert "Paris" in answer
    assert refusal == "NOT_FOUND model_not_found"


def test_a_grpc_client_that_leaves_is_cancelled(channel: grpc.Channel, url: str) -> None:
    stub = PacelineStub(channel)
    asked = pb.GenerateRequest(model=MODEL, prompt="x", max_tokens=2000, ignore_eos=True, request_id="a")
    assert_idle(url)
    stream = stub.GenerateStream(asked)
    for _, _ in zip(stream, range(3), strict=False):
        pass
    stream.cancel()
    assert_idle(url)
    for call in (stub.Generate, lambda *args, **more: list(stub.GenerateStream(*args, **more))):
        with pytest.raises(grpc.RpcError) as late:
            call(asked, timeout=1.0)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert_idle(url)
    stream = stub.GenerateStream(asked)
    next(stream)
    assert stub.Abort(pb.AbortRequest(request_id="a"), timeout=60).is_aborted
    with pytest.raises(grpc.RpcError) as aborted:
        list(stream)
    assert code_of(aborted.value) == "aborted"
    assert_idle(url)


def test_grpc_health_and_reflection(channel: grpc.Channel) -> None:
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=60).status == 1
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    assert {SERVICE, "grpc.health.v1.Health"} <= set(services)


def test_many_at_once(client: openai.OpenAI, url: str) -> None:
    def ask(seed: int) -> str:
        with client.completions.create(
            model=MODEL, prompt="The", seed=seed, max_tokens=12, stream=True
        ) as stream:
            return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(32)))
    assert len(set(texts)) > 16
    assert_idle(url)


def test_metrics_have_the_names_dashboards_know(url: str) -> None:
    numbers = metrics(url)
    for name in (
        "prompt_tokens_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "request_success_total",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "spec_decode_num_accepted_tokens_per_pos_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
    ):
        assert f"vllm:{name}" in numbers
    assert numbers["vllm:generation_tokens_total"] > 0
    assert numbers["paceline:step_compute_seconds_total"] > 0


def test_answers_are_what_openai_s_schemas_say(schemas: dict[str, Any], url: str) -> None:
    http = httpx.Client(base_url=f"{url}/v1", trust_env=False, timeout=120)
    chat = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 4,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    text = {"model": MODEL, "prompt": "Hello", "max_tokens": 4, "logprobs": 2}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    bare = {**chat, "logprobs": None, "top_logprobs": None}
    for body in (chat, bare, {**bare, "speculation": {"steps": True}}):
        if "speculation" not in body:
            valid(schemas, "CreateChatCompletionResponse", http.post("/chat/completions", json=body).json())
        reply = http.post("/chat/completions", json={**body, **streamed})
        for line in reply.text.split("\n\n")[:-2]:
            valid(schemas, "CreateChatCompletionStreamResponse", json.loads(line.removeprefix("data: ")))
    for body in (text, {**text, "logprobs": None}):
        valid(schemas, "CreateCompletionResponse", http.post("/completions", json=body).json())
        for line in http.post("/completions", json={**body, **streamed}).text.split("\n\n")[:-2]:
            chunk = json.loads(line.removeprefix("data: "))
            # OpenAI publishes one schema for answers and chunks; it leaves out the nulls of its chunks.
            choices = [
                {**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]
            ]
            valid(schemas, "CreateCompletionResponse", {**chunk, "choices": choices, "usage": USAGE})
    valid(schemas, "ListModelsResponse", http.get("/models").json())
    valid(schemas, "Model", http.get(f"/models/{MODEL}").json())
    valid(schemas, "ErrorResponse", http.post("/completions", json={}).json())
    http.close()


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def test_a_schema_is_kept(client: openai.OpenAI, schemas: dict[str, Any]) -> None:
    """Sampled and hot, so that without a mask it would not be."""
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "weather", "strict": True, "schema": WEATHER["function"]["parameters"]},
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=form, temperature=1.5, seed=3, n=2, max_tokens=80
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), WEATHER["function"]["parameters"])
    valid(schemas, "CreateChatCompletionResponse", json.loads(answer.model_dump_json(exclude_unset=True)))


def test_a_required_tool_is_called(client: openai.OpenAI, schemas: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it raining in Paris?"}]
    asked: Any = {"model": MODEL, "messages": messages, "tools": [WEATHER], "tool_choice": "required"}
    asked |= {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 80}
    answer = client.chat.completions.create(**asked)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])
    valid(schemas, "CreateChatCompletionResponse", json.loads(answer.model_dump_json(exclude_unset=True)))

    with client.chat.completions.stream(**asked) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    assert events.count("tool_calls.function.arguments.delta") > 3
    assert streamed.message.tool_calls is not None
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments

    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "It is raining."}]
    closing = client.chat.completions.create(**{**asked, "tool_choice": "none"})
    assert closing.choices[0].message.content
    assert closing.usage is not None
    assert answer.usage is not None
    assert closing.usage.prompt_tokens != answer.usage.prompt_tokens


def test_a_grammar_that_is_none_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(
            model=MODEL, prompt="1", extra_body={"structured_outputs": {"regex": "[a-z"}}
        )
    assert refused.value.code == "invalid_grammar"
