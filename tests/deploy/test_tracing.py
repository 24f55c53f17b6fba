"""Spans of a request, as a collector receives them over OTLP/HTTP."""

import gzip
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from front import MODEL, listening, scripted_front
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from paceline.deploy.tracing import Tracer

TRACE_ID, CALLER_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECRET = "the fox says nothing"
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": SECRET,
    "max_tokens": 12,
    "ignore_eos": True,
    "stream": True,
}


class Collector:
    """Keeps every span that is posted to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.raw = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                outer.raw += body
                for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    for of_scope in of_resource.scope_spans:
                        outer.spans += of_scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                del format, args

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def collector() -> Iterator[Collector]:
    it = Collector()
    thread = threading.Thread(target=it.server.serve_forever)
    thread.start()
    yield it
    it.server.shutdown()
    thread.join()
    it.server.server_close()


def ask(
    collector: Collector, path: Path, ratio: float, headers: dict[str, str], **fields: Any
) -> httpx.Response:
    """One request to a server that drafts four of five tokens; returns when its spans have arrived."""
    front, engine = scripted_front(path)
    engine.tokens_per_step, engine.step_s = 5, 0.02
    url = f"http://127.0.0.1:{collector.server.server_port}"
    tracer = Tracer.to(url, ratio, MODEL, "replica-1")
    with listening(replace(front, tracer=tracer)) as address, httpx.Client(trust_env=False) as client:
        reply = client.post(f"{address}/v1/completions", json={**BODY, **fields}, headers=headers)
    tracer.close()
    return reply


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def test_the_spans_of_a_request(collector: Collector, tmp_path: Path) -> None:
    caller = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01", "x-request-id": "mine"}
    assert ask(collector, tmp_path, 0.0, caller).status_code == 200
    (request,) = collector.named("POST /v1/completions")
    (choice,) = collector.named("generate")
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    assert request.parent_span_id.hex() == CALLER_ID
    assert choice.parent_span_id == request.span_id
    told = attributes(request)
    assert (told["http.response.status_code"], told["paceline.request_id"]) == (200, "mine")
    assert attributes(choice)["paceline.num_accepted"] == 4 + 1
    assert attributes(choice)["gen_ai.usage.output_tokens"] == 12
    phases = {name: collector.named(name) for name in ("queue", "prefill", "step", "draft", "verify")}
    assert {name: len(spans) for name, spans in phases.items()} == {
        "queue": 1, "prefill": 1, "step": 2, "draft": 2, "verify": 2,
    }  # fmt: skip
    by_id = {span.span_id: span for span in collector.spans}
    for span in collector.spans:
        if span is not request:
            parent = by_id[span.parent_span_id]
            inside = parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert inside, (parent.name, span.name)
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, (parent.name, span.name)
    verify = phases["verify"][0]
    assert verify.end_time_unix_nano - verify.start_time_unix_nano == 10_000_000


def test_no_text_is_in_them(collector: Collector, tmp_path: Path) -> None:
    ask(collector, tmp_path, 1.0, {})
    assert collector.named("step")
    assert b"fox" not in collector.raw


def test_every_choice_has_its_span(collector: Collector, tmp_path: Path) -> None:
    ask(collector, tmp_path, 1.0, {}, n=3, stream=False)
    assert len(collector.named("generate")) == 3
    assert attributes(collector.named("POST /v1/completions")[0])["gen_ai.usage.output_tokens"] == 36


@pytest.mark.parametrize(("ratio", "flag"), [(0.0, None), (1.0, "00")])
def test_what_is_not_sampled_is_not_sent(
    collector: Collector, tmp_path: Path, ratio: float, flag: str | None
) -> None:
    headers = {} if flag is None else {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-{flag}"}
    assert ask(collector, tmp_path, ratio, headers).status_code == 200
    assert collector.spans == []


def test_a_refused_request_has_a_span_without_steps(collector: Collector, tmp_path: Path) -> None:
    assert ask(collector, tmp_path, 1.0, {}, max_tokens=100_000).status_code == 400
    assert [span.name for span in collector.spans] == ["POST /v1/completions"]
    assert attributes(collector.spans[0])["http.response.status_code"] == 400
