"""OpenTelemetry spans of a request and its steps, with `--otlp-endpoint`; nothing is imported without it.

    POST /v1/chat/completions          the HTTP request, a child of the caller's span if it sent a traceparent
      generate                         one choice
        queue, prefill                 until its first token
        step                           each further step: how many tokens it gave, how many drafts stood
          draft, verify                as the scheduler and rank 0 measured them, put at the end of the step

Spans hold counts, times and ids, never text. A request that is not sampled costs a comparison per step.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..cluster.errors import ConfigError
from ..cluster.messages import Output

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

MOST_STEPS = 512  # of a choice; further ones are only counted

_NS = 1_000_000_000


class Tracer:
    """Where spans go. One per replica."""

    def __init__(self, provider: "TracerProvider", model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("paceline")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    @classmethod
    def to(cls, endpoint: str, ratio: float, model_name: str, replica: str) -> "Tracer":
        """Export over OTLP/HTTP to `endpoint`; `ratio` of the requests whose caller has not decided it.

        Raises ConfigError when OpenTelemetry is not installed.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
        except ImportError:
            raise ConfigError(
                "otlp_endpoint needs OpenTelemetry: pip install 'paceline[tracing]', or leave it out"
            ) from None
        url = endpoint if endpoint.endswith("/v1/traces") else f"{endpoint.rstrip('/')}/v1/traces"
        resource = Resource.create({"service.name": "paceline", "service.instance.id": replica})
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(ratio), resource=resource, shutdown_on_exit=False
        )
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        return cls(provider, model_name)

    def start_request(self, headers: Mapping[str, str], method: str) -> "RequestTrace | None":
        """The span of an HTTP request; None if it is not sampled."""
        from opentelemetry.trace import SpanKind

        context = self._propagator.extract(headers)
        span = self._tracer.start_span(method, context, kind=SpanKind.SERVER)
        return RequestTrace(self, span, method) if span.is_recording() else None

    def child(self, parent: "Span", name: str, start_ns: int, attributes: dict[str, Any]) -> "Span":
        from opentelemetry.trace import set_span_in_context

        return self._tracer.start_span(
            name, set_span_in_context(parent), start_time=start_ns, attributes=attributes
        )

    @property
    def model_name(self) -> str:
        return self._model_name

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


class RequestTrace:
    """The span of one HTTP request, and the parent of its choices'."""

    def __init__(self, tracer: Tracer, span: "Span", method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method

    @property
    def trace_id(self) -> str:
        return f"{self._span.get_span_context().trace_id:032x}"

    def choice(self, prompt_len: int, max_tokens: int) -> "ChoiceTrace":
        """A choice is submitted now."""
        attributes = {
            "gen_ai.request.model": self._tracer.model_name,
            "gen_ai.request.max_tokens": max_tokens,
            "gen_ai.usage.input_tokens": prompt_len,
        }
        return ChoiceTrace(self._tracer, self._tracer.child(self._span, "generate", _now(), attributes))

    def end(self, route: str, status: int, request_id: str | None, usage: Mapping[str, Any]) -> None:
        from opentelemetry.trace import StatusCode

        self._span.update_name(f"{self._method} {route}")
        self._span.set_attribute("http.request.method", self._method)
        self._span.set_attribute("http.route", route)
        self._span.set_attribute("http.response.status_code", status)
        if request_id is not None:
            self._span.set_attribute("paceline.request_id", request_id)
        if "completion_tokens" in usage:
            self._span.set_attribute("gen_ai.usage.output_tokens", usage["completion_tokens"])
        if status >= 500:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class ChoiceTrace:
    """The span of one choice and of its phases, all made when the step they belong to has ended."""

    def __init__(self, tracer: Tracer, span: "Span") -> None:
        self._tracer = tracer
        self._span = span
        self._last_ns = _now()
        self._num_steps = 0
        self._num_drafts = 0
        self._num_accepted = 0

    def step(self, num_tokens: int, output: Output) -> None:
        """A step gave so many tokens."""
        now = _now()
        self._num_steps += 1
        self._num_drafts += output.num_drafts
        self._num_accepted += output.num_accepted
        if self._num_steps == 1:
            admitted = min(now, self._last_ns + int(output.queue_s * _NS))
            self._add(self._span, "queue", self._last_ns, admitted, {})
            cached = {"paceline.num_cached_tokens": output.num_cached_tokens}
            self._add(self._span, "prefill", admitted, now, cached)
        elif self._num_steps <= MOST_STEPS:
            counts = {
                "paceline.num_tokens": num_tokens,
                "paceline.num_drafts": output.num_drafts,
                "paceline.num_accepted": output.num_accepted,
            }
            step = self._tracer.child(self._span, "step", self._last_ns, counts)
            verify = max(self._last_ns, now - int(output.verify_s * _NS))
            draft = max(self._last_ns, verify - int(output.draft_s * _NS))
            if draft < verify:
                self._add(step, "draft", draft, verify, {})
            self._add(step, "verify", verify, now, {})
            step.end(now)
        self._last_ns = now

    def end(self, reason: str, num_tokens: int, num_preemptions: int) -> None:
        for name, value in (
            ("gen_ai.response.finish_reasons", [reason]),
            ("gen_ai.usage.output_tokens", num_tokens),
            ("paceline.num_steps", self._num_steps),
            ("paceline.num_drafts", self._num_drafts),
            ("paceline.num_accepted", self._num_accepted),
            ("paceline.num_preemptions", num_preemptions),
        ):
            self._span.set_attribute(name, value)
        self._span.end()

    def _add(self, parent: "Span", name: str, start: int, end: int, attributes: dict[str, Any]) -> None:
        self._tracer.child(parent, name, start, attributes).end(end)


def _now() -> int:
    return time.time_ns()
