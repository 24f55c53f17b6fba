"""The numbers behind /metrics: vLLM's names, so that its dashboards work, and our own beside them."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest

from ..cluster.messages import Output, Stats
from .engine_numbers import LABELS, EngineNumbers, LeanHistogram
from .tracing import ChoiceTrace, RequestTrace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10),
)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_COUNTS = (1, 2, 5, 10, 20)
_REASONS = ("stop", "length", "abort", "error")

disable_created_metrics()  # a time of birth beside every counter, which nobody reads


class Metrics:
    """What one replica counts. Every choice of a request counts as a request, as in vLLM.

    The label `engine` is the replica's id, so that series of several replicas stay apart.
    """

    def __init__(
        self,
        model_name: str,
        engine: str,
        stats: Callable[[], Stats],
        *,
        num_rebuilds: Callable[[], int] = lambda: 0,
        cache_config: dict[str, str] | None = None,
    ) -> None:
        self._registry = CollectorRegistry()
        own = (model_name, engine)
        self._registry.register(EngineNumbers(own, stats, num_rebuilds, cache_config or {}))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, LABELS, registry=self._registry, buckets=buckets).labels(*own)

        self.first_token_s = histogram("vllm:time_to_first_token_seconds", "Submit to first token.", _TTFT_S)
        self.inter_token_s = LeanHistogram(
            "vllm:inter_token_latency_seconds", "Between tokens, once per step.", own, _PER_TOKEN_S
        )
        self._registry.register(self.inter_token_s)
        self.per_token_s = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between a request's tokens.",
            _PER_TOKEN_S,
        )
        self.request_s = histogram("vllm:e2e_request_latency_seconds", "Submit to last token.", _REQUEST_S)
        self.queue_s = histogram("vllm:request_queue_time_seconds", "Submit to the first step.", _REQUEST_S)
        self.inference_s = histogram(
            "vllm:request_inference_time_seconds", "First step to last token.", _REQUEST_S
        )
        self.prefill_s = histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", _REQUEST_S
        )
        self.decode_s = histogram("vllm:request_decode_time_seconds", "First to last token.", _REQUEST_S)
        self.prompt_len = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.output_len = histogram("vllm:request_generation_tokens", "Tokens of an output.", _TOKENS)
        self.max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self.max_output_len = histogram(
            "vllm:request_max_num_generation_tokens", "Most tokens that a request may get.", _TOKENS
        )
        self.num_choices = histogram("vllm:request_params_n", "n of a request.", _COUNTS)
        self.num_preemptions = histogram(
            "vllm:request_num_preemptions", "Times a request lost its pages.", (0, *_COUNTS)
        )
        self.num_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found in the cache.", _TOKENS
        )
        finished = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.finished = {reason: finished.labels(*own, reason) for reason in _REASONS}
        self._answers = Counter(
            "http_requests",
            "Answers by route and status.",
            (*LABELS, "method", "handler", "status"),
            registry=self._registry,
        )
        self._answer_s = Histogram(
            "http_request_duration_seconds",
            "Head of a request to the end of its answer.",
            (*LABELS, "method", "handler"),
            registry=self._registry,
            buckets=_TTFT_S,
        )
        self._own = own

    def start(
        self, prompt_len: int = 0, max_tokens: int = 0, trace: RequestTrace | None = None
    ) -> "RequestTimer":
        """A request is submitted now, for one choice of what `trace` follows."""
        self.prompt_len.observe(prompt_len)
        self.max_tokens.observe(max_tokens)
        self.max_output_len.observe(max_tokens)
        return RequestTimer(self, prompt_len, None if trace is None else trace.choice(prompt_len, max_tokens))

    def answered(self, method: str, route: str, status: int, duration_s: float) -> None:
        """An HTTP request has been answered; `route` is the pattern of its path."""
        self._answers.labels(*self._own, method, route, str(status)).inc()
        self._answer_s.labels(*self._own, method, route).observe(duration_s)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class RequestTimer:
    """The life of one request in seconds: `add` at each step, `finish` with a reason, `close` always."""

    def __init__(self, metrics: Metrics, prompt_len: int, trace: ChoiceTrace | None) -> None:
        self._metrics = metrics
        self._prompt_len = prompt_len
        self._trace = trace
        self._started = self._first = self._last = time.perf_counter()
        self._queue_s = 0.0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._is_closed = False

    @property
    def is_traced(self) -> bool:
        return self._trace is not None

    def add(self, num_tokens: int, output: Output) -> None:
        """A step gave so many tokens that the client may see."""
        if self._trace is not None:
            self._trace.step(num_tokens, output)
        self._num_preemptions = output.num_preemptions
        if output.first_index == 0:
            self._queue_s = output.queue_s
            self._metrics.num_computed.observe(self._prompt_len - output.num_cached_tokens)
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._num_tokens:
            self._metrics.inter_token_s.observe((now - self._last) / num_tokens)
        else:
            self._metrics.first_token_s.observe(now - self._started)
            self._first = now
        self._num_tokens += num_tokens
        self._last = now

    def finish(self, reason: str) -> None:
        """The request has ended: "stop", "length", "abort" or "error"."""
        self._is_closed = True
        if self._trace is not None:
            self._trace.end(reason, self._num_tokens, self._num_preemptions)
        metrics = self._metrics
        total_s = time.perf_counter() - self._started
        metrics.finished[reason].inc()
        metrics.request_s.observe(total_s)
        metrics.output_len.observe(self._num_tokens)
        metrics.num_preemptions.observe(self._num_preemptions)
        if not self._num_tokens:
            return
        metrics.queue_s.observe(self._queue_s)
        metrics.inference_s.observe(max(0.0, total_s - self._queue_s))
        metrics.prefill_s.observe(max(0.0, self._first - self._started - self._queue_s))
        metrics.decode_s.observe(self._last - self._first)
        if self._num_tokens > 1:
            metrics.per_token_s.observe((self._last - self._first) / (self._num_tokens - 1))

    def close(self) -> None:
        """Without `finish` before: the client left."""
        if not self._is_closed:
            self.finish("abort")


def merged(texts: Iterable[bytes]) -> bytes:
    """What several replicas render as one text: the samples of a family together, its head once."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        for family in text.split(b"# HELP ")[1:]:
            about, kind, *samples = family.splitlines(keepends=True)
            families.setdefault(b"# HELP " + about + kind, []).extend(samples)
    return b"".join(head + b"".join(samples) for head, samples in families.items())
