"""The gRPC door over real sockets, with scripted tokens: messages, refusals, cancellation, guards."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from front import MODEL, ScriptedEngine, scripted_front
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.cluster.errors import EngineError, RequestError
from paceline.deploy.api.keys import KeyRing, load_keys
from paceline.deploy.grpc import generate
from paceline.deploy.grpc import paceline_pb2 as pb
from paceline.deploy.grpc.paceline_pb2_grpc import PacelineStub, add_PacelineServicer_to_server
from paceline.deploy.grpc.service import SERVICE, GrpcMethods

SAYS = "the fox says 🦊 and goes on"


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


class Door:
    """A server, a channel to it, and the engine behind it."""

    def __init__(
        self, path: Path, engine: ScriptedEngine, methods: GrpcMethods, channel: grpc.aio.Channel
    ) -> None:
        self.path = path
        self.engine = engine
        self.methods = methods
        self.stub = PacelineStub(channel)
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    async def idle(self) -> None:
        async with asyncio.timeout(5):
            while self.engine.live:
                await asyncio.sleep(0.005)

    async def refused(self, call: Any) -> tuple[grpc.StatusCode, dict[str, str], str]:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await (_drained(call) if hasattr(call, "__aiter__") else call)
        error = refusal.value
        trailers = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
        return error.code(), trailers, error.details() or ""


async def opened(path: Path, ring: KeyRing, abandoned_s: float) -> AsyncIterator[Door]:
    front, engine = scripted_front(path, abandoned_s=abandoned_s, keys=ring)
    methods = GrpcMethods()
    methods.open_grpc(front)
    server = grpc.aio.server()
    add_PacelineServicer_to_server(methods, server)
    health_pb2_grpc.add_HealthServicer_to_server(methods, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Door(path, engine, methods, channel)
    await server.stop(1)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async for it in opened(tmp_path, KeyRing(), 0.3):
        yield it


def text(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(model=MODEL, prompt="the fox?", **fields)


async def test_a_whole_answer(door: Door) -> None:
    answer = await door.stub.Generate(text(n=2, max_tokens=50, seed=-3))

    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, SAYS, "stop"),
        (1, SAYS, "stop"),
    ]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == MODEL
    assert door.engine.params[0].seed == 2**64 - 3


async def test_a_stream_says_the_same_and_ends_with_usage(door: Door) -> None:
    whole = await door.stub.Generate(text())
    *chunks, last = [chunk async for chunk in door.stub.GenerateStream(text())]

    assert "".join(chunk.text for chunk in chunks) == SAYS
    assert chunks[-1].finish_reason == "stop"
    assert len({chunk.id for chunk in [*chunks, last]}) == 1
    assert last.usage == whole.usage


async def test_chat_and_token_ids_reach_the_engine_as_over_http(door: Door) -> None:
    messages = pb.Messages(messages=[pb.Message(role="user", content="hi")])
    await door.stub.Generate(pb.GenerateRequest(model=MODEL, chat=messages))
    tokens = await door.stub.Tokenize(pb.TokenizeRequest(model=MODEL, chat=messages))
    await door.stub.Generate(pb.GenerateRequest(model=MODEL, prompt_ids=pb.TokenIds(token_ids=[5, 6, 7])))

    assert door.engine.prompts == [list(tokens.token_ids), [5, 6, 7]]
    assert tokens.max_model_len == 256


async def test_every_parameter_is_validated_and_passed_on(door: Door) -> None:
    request = text(
        temperature=0.5,
        top_k=3,
        stop=["says"],
        stop_token_ids=[9],
        logit_bias={4: -1.5},
        max_tokens=40,
        extra_json='{"bad_words": ["zebra"], "speculation": {"max_draft_tokens": 2}}',
    )
    answer = await door.stub.Generate(request)
    params = door.engine.params[0]

    assert answer.choices[0].text == "the fox "
    assert (params.temperature, params.top_k, params.logit_bias) == (0.5, 3, {4: -1.5})
    assert 9 in params.stop_token_ids
    assert params.bad_words
    assert door.engine.draft_limits == [2]


async def test_logprobs(door: Door) -> None:
    answer = await door.stub.Generate(text(logprobs=2, max_tokens=3))
    tokens = answer.choices[0].logprobs

    assert len(tokens) == 3
    assert b"".join(token.token for token in tokens).decode() == answer.choices[0].text
    assert [len(token.top_logprobs) for token in tokens] == [2, 2, 2]


@pytest.mark.parametrize(
    ("request_", "status", "code", "param"),
    [
        (pb.GenerateRequest(model=MODEL), "INVALID_ARGUMENT", "missing_required_parameter", "input"),
        (pb.GenerateRequest(prompt="x"), "INVALID_ARGUMENT", "missing_required_parameter", "model"),
        (pb.GenerateRequest(model="gpt", prompt="x"), "NOT_FOUND", "model_not_found", "model"),
        (text(temperature=3), "INVALID_ARGUMENT", "decimal_above_max_value", "temperature"),
        (text(temperature=math.nan), "INVALID_ARGUMENT", "invalid_json", None),
        (text(n=-1), "INVALID_ARGUMENT", "integer_below_min_value", "n"),
        (text(max_tokens=9999), "INVALID_ARGUMENT", "context_length_exceeded", "prompt"),
        (text(logit_bias={-4: 1.0}), "INVALID_ARGUMENT", "invalid_token_id", "logit_bias"),
        (text(stop_token_ids=[2**31 - 1]), "INVALID_ARGUMENT", "invalid_token_id", "stop_token_ids"),
        (text(stop=[""]), "INVALID_ARGUMENT", "empty_string", "stop[0]"),
        (text(extra_json="{"), "INVALID_ARGUMENT", "invalid_json", "extra_json"),
        (text(extra_json="[1]"), "INVALID_ARGUMENT", "invalid_type", "extra_json"),
        (text(extra_json='{"prompt": "y"}'), "INVALID_ARGUMENT", "duplicate_key", "extra_json"),
        (text(extra_json='{"user": "\\ud800"}'), "INVALID_ARGUMENT", "invalid_encoding", None),
        (text(extra_json="[" * 99999), "INVALID_ARGUMENT", "invalid_json", "extra_json"),
        (
            pb.GenerateRequest(
                model=MODEL, chat=pb.Messages(messages=[pb.Message(role="king", content="x")])
            ),
            "INVALID_ARGUMENT",
            "invalid_value",
            "messages[0].role",
        ),
        (
            pb.GenerateRequest(model=MODEL, prompt_ids=pb.TokenIds(token_ids=[-1])),
            "INVALID_ARGUMENT",
            "invalid_token_id",
            "prompt",
        ),
        (pb.GenerateRequest(model=MODEL, chat=pb.Messages()), "INVALID_ARGUMENT", "empty_array", "messages"),
        (text(cache_salt="../x"), "INVALID_ARGUMENT", "invalid_value", "cache_salt"),
        (
            pb.GenerateRequest(model=MODEL, prompt="x" * (1 << 20)),
            "RESOURCE_EXHAUSTED",
            "request_too_large",
            None,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_malformed_request_is_refused_in_every_way_alike(
    door: Door, request_: pb.GenerateRequest, status: str, code: str, param: str | None
) -> None:
    for call in (door.stub.Generate(request_), door.stub.GenerateStream(request_)):
        got_status, trailers, details = await door.refused(call)

        assert (got_status.name, trailers["paceline-code"]) == (status, code), details
        assert trailers.get("paceline-param") == param
        assert details
    assert not door.engine.params


async def test_refusals_and_failures_of_the_engine_have_their_own_status(door: Door) -> None:
    door.engine.fails_at = 2
    door.engine.failure = RequestError("full", status=429, code="rate_limit_exceeded", retry_after_s=7)
    status, trailers, _ = await door.refused(door.stub.Generate(text()))
    assert (status, trailers["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "7")
    door.engine.failure = EngineError("lost")
    status, trailers, _ = await door.refused(door.stub.GenerateStream(text()))
    assert (status, trailers["paceline-code"]) == (grpc.StatusCode.UNAVAILABLE, "engine_unavailable")
    door.engine.failure = KeyError("secret detail")
    status, _, details = await door.refused(door.stub.Generate(text()))
    assert (status, details) == (grpc.StatusCode.INTERNAL, "internal error")


@pytest.mark.parametrize("kind", ["Generate", "GenerateStream"])
async def test_cancelling_and_deadlines_end_the_request_in_the_engine(door: Door, kind: str) -> None:
    door.engine.step_s = 0.02
    call = getattr(door.stub, kind)
    cancelled = call(text(ignore_eos=True))
    await asyncio.sleep(0.1)
    assert len(door.engine.live) == 1
    cancelled.cancel()
    await door.idle()
    late = call(text(ignore_eos=True), timeout=0.15)
    status, _, _ = await door.refused(late)
    assert status == grpc.StatusCode.DEADLINE_EXCEEDED
    await door.idle()
    assert len(door.engine.cancelled) == 2


async def test_abort_by_name_from_another_call(door: Door) -> None:
    door.engine.step_s = 0.02
    stream = door.stub.GenerateStream(text(ignore_eos=True, request_id="mine"))
    await anext(aiter(stream))
    status, trailers, _ = await door.refused(door.stub.Generate(text(request_id="mine")))
    assert trailers["paceline-code"] == "duplicate_request_id"
    assert (await door.stub.Abort(pb.AbortRequest(request_id="mine"))).is_aborted
    status, trailers, _ = await door.refused(stream)
    assert (status, trailers["paceline-code"]) == (grpc.StatusCode.CANCELLED, "aborted")
    await door.idle()
    assert not (await door.stub.Abort(pb.AbortRequest(request_id="mine"))).is_aborted


async def test_abort_asks_the_other_replicas(door: Door) -> None:
    asked: list[str] = []

    async def elsewhere(caller: str, request_id: str) -> list[bool]:
        assert caller == ""
        asked.append(request_id)
        return [False, request_id == "theirs"]

    door.methods.open_grpc(scripted_front(door.path)[0], abort_elsewhere=elsewhere)
    assert (await door.stub.Abort(pb.AbortRequest(request_id="theirs"))).is_aborted
    assert not (await door.stub.Abort(pb.AbortRequest(request_id="nobody's"))).is_aborted
    assert asked == ["theirs", "nobody's"]


async def test_nobody_aborts_what_is_another_s(tmp_path: Path) -> None:
    ring = KeyRing(load_keys(None, {"PACELINE_API_KEYS": "alice sk-alices-key,bob sk-bobs-key"}))
    async for door in opened(tmp_path, ring, 1.0):
        alice, bob = ([("authorization", f"Bearer sk-{name}-key")] for name in ("alices", "bobs"))
        door.engine.step_s = 0.02
        stream = door.stub.GenerateStream(text(ignore_eos=True, request_id="mine"), metadata=alice)
        await anext(aiter(stream))
        request = pb.AbortRequest(request_id="mine")
        assert not (await door.stub.Abort(request, metadata=bob)).is_aborted
        assert (await door.stub.Abort(request, metadata=alice)).is_aborted
        assert door.engine.salts == ["alice/"]
        await door.idle()


async def test_each_call_is_counted_and_logged_without_its_text(
    door: Door, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "paceline.requests")
    await door.stub.Generate(text())
    await door.refused(door.stub.GenerateStream(text(top_p=3)))
    good, bad = (record.__dict__["fields"] for record in caplog.records)
    assert (good["route"], good["status"]) == (f"/{SERVICE}/Generate", 200)
    assert good["completion_tokens"] > 5
    assert (bad["route"], bad["status"]) == (f"/{SERVICE}/GenerateStream", 400)
    assert "fox" not in caplog.text


async def test_health_and_its_watch(door: Door) -> None:
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    for service in ("", SERVICE):
        assert (await door.health.Check(health_pb2.HealthCheckRequest(service=service))).status == serving
    status, _, _ = await door.refused(door.health.Check(health_pb2.HealthCheckRequest(service="other")))
    assert status == grpc.StatusCode.NOT_FOUND
    watch = door.health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == serving
    door.engine.health = EngineError("stuck")
    assert (await watch.read()).status == not_serving
    watch.cancel()


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.Generate(text()),
        lambda stub: stub.GenerateStream(text()),
        lambda stub: stub.Tokenize(pb.TokenizeRequest(model=MODEL, prompt="x")),
        lambda stub: stub.Abort(pb.AbortRequest(request_id="x")),
    ],
)
async def test_keys_are_those_of_http(tmp_path: Path, call: Callable[[Any], Any]) -> None:
    async for door in opened(tmp_path, KeyRing(load_keys(None, {"PACELINE_API_KEYS": "sk-secret"})), 1.0):
        status, trailers, _ = await door.refused(call(door.stub))
        assert (status, trailers["paceline-code"]) == (grpc.StatusCode.UNAUTHENTICATED, "invalid_api_key")
        assert (await door.health.Check(health_pb2.HealthCheckRequest())).status == 1
        answer = await door.stub.Generate(text(), metadata=[("authorization", "Bearer sk-secret")])
        assert answer.choices[0].text == SAYS


def test_the_shipped_stubs_are_those_of_the_proto_file(tmp_path: Path) -> None:
    generate.generate(tmp_path)

    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(made) == {"paceline_pb2.py", "paceline_pb2.pyi", "paceline_pb2_grpc.py"}
    assert made == {name: (generate.PROTO.parent / name).read_text() for name in made}


async def test_prompts_are_told_of_as_over_http(door: Door) -> None:
    request = text(prompt_logprobs=1, return_token_ids=True, max_tokens=3, n=2, extra_json='{"echo": true}')
    answer = await door.stub.Generate(request)
    ids = door.engine.prompts[-1]
    for choice in answer.choices:
        assert list(choice.prompt_token_ids) == ids
        assert [entry.token_id for entry in choice.prompt_logprobs] == ids[1:]
        assert all(len(entry.top_logprobs) == 1 for entry in choice.prompt_logprobs)
        assert len(choice.token_ids) == 3
        assert choice.text.startswith("the fox?")
    *chunks, _ = [
        chunk async for chunk in door.stub.GenerateStream(text(return_token_ids=True, max_tokens=3))
    ]
    assert [i for chunk in chunks for i in chunk.token_ids] == list(answer.choices[0].token_ids)
    plain = (await door.stub.Generate(text(max_tokens=3))).choices[0]
    assert not [*plain.token_ids, *plain.prompt_token_ids, *plain.prompt_logprobs]
    status, trailers, _ = await door.refused(door.stub.GenerateStream(text(prompt_logprobs=1)))
    assert (status, trailers["paceline-param"]) == (grpc.StatusCode.INVALID_ARGUMENT, "prompt_logprobs")
    await door.stub.Generate(text(truncate_prompt_tokens=2))
    assert len(door.engine.prompts[-1]) == 2
    report = '{"speculation": {"report": true}}'
    answer = await door.stub.Generate(text(max_tokens=3, extra_json=report))
    assert "speculative_decoding" in json.loads(answer.metrics_json)
    *_, last = [chunk async for chunk in door.stub.GenerateStream(text(max_tokens=3, extra_json=report))]
    assert last.metrics_json == answer.metrics_json
    steps = door.stub.GenerateStream(text(extra_json='{"speculation": {"steps": true}}'))
    assert (await door.refused(steps))[1]["paceline-param"] == "speculation.steps"
