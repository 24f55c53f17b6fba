"""The numbers behind /metrics: vLLM's names, so that its dashboards work, and our own beside them."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..cluster.messages import ShardState, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)

disable_created_metrics()  # a time of birth beside every counter, which nobody reads


class Metrics:
    """What one replica counts. Every choice of a request counts as a request, as in vLLM."""

    def __init__(self, model_name: str, engine: str, stats: Callable[[], Stats]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineNumbers((model_name, engine), stats))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(name, text, _LABELS, registry=self._registry, buckets=buckets)
            return family.labels(model_name, engine)

        self.first_token_s = histogram("vllm:time_to_first_token_seconds", "Submit to first token.", _TTFT_S)
        self.inter_token_s = histogram(
            "vllm:inter_token_latency_seconds", "Between tokens, once per step.", _INTER_TOKEN_S
        )
        self.request_s = histogram("vllm:e2e_request_latency_seconds", "Submit to last token.", _REQUEST_S)
        finished = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self.finished = {
            reason: finished.labels(model_name, engine, reason) for reason in ("stop", "length", "abort")
        }

    def start(self) -> "RequestTimer":
        return RequestTimer(self)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._registry)


class RequestTimer:
    """The life of one request in seconds: `add` at each step, `finish` with a reason, `close` always."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._started = self._last = time.perf_counter()
        self._has_tokens = False
        self._is_closed = False

    def add(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = time.perf_counter()
        if self._has_tokens:
            self._metrics.inter_token_s.observe((now - self._last) / num_tokens)
        else:
            self._metrics.first_token_s.observe(now - self._started)
        self._has_tokens, self._last = True, now

    def finish(self, reason: str) -> None:
        self._is_closed = True
        self._metrics.finished[reason].inc()
        self._metrics.request_s.observe(time.perf_counter() - self._started)

    def close(self) -> None:
        """Without `finish` before: the client left, or the engine failed."""
        if not self._is_closed:
            self.finish("abort")


class _EngineNumbers(Collector):
    """The scheduler's latest heartbeat as gauges and counters."""

    def __init__(self, labels: tuple[str, str], stats: Callable[[], Stats]) -> None:
        self._labels = labels
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield from self._steps(stats)
        yield from self._drafting(stats)
        yield from self._shards(stats)

    def _steps(self, stats: Stats) -> Iterator[Metric]:
        used_share = (stats.num_pages - stats.num_free_pages) / max(stats.num_pages, 1)
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of K/V pages in use, 0..1.", used_share),
            ("paceline:num_pages", "Pages of K/V.", stats.num_pages),
            ("paceline:num_free_pages", "Pages of K/V no request holds.", stats.num_free_pages),
        ):
            yield self._gauge(name, text, value)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("vllm:num_preemptions", "Times a request lost its pages.", stats.num_preemptions),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_prefix_hits),
            ("paceline:steps", "Steps.", stats.num_steps),
            ("paceline:step_plan_seconds", "Time spent deciding.", stats.plan_s),
            ("paceline:step_wait_seconds", "Time from plan sent to last result.", stats.wait_s),
            ("paceline:step_compute_seconds", "Time rank 0 computed.", stats.compute_s),
            ("paceline:ignored_messages", "Messages of no use any more.", stats.num_ignored_messages),
        ):
            yield self._counter(name, text, value)

    def _drafting(self, stats: Stats) -> Iterator[Metric]:
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Blocks verified.", stats.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafted tokens verified.", stats.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that stood.", stats.num_accepted_tokens),
            ("paceline:draft_phases", "Times the shards were asked.", stats.num_draft_phases),
            ("paceline:draft_seconds", "Time from shard plans sent to last drafts.", stats.draft_s),
            ("paceline:commit_rows", "Tap rows that became context.", stats.num_commit_rows),
            ("paceline:slides", "Times a context let go of its start.", stats.num_slides),
            ("paceline:context_restarts", "Times a context began anew.", stats.num_context_restarts),
            ("paceline:late_drafts", "Drafts that came too late to be used.", stats.num_late_drafts),
        ):
            yield self._counter(name, text, value)
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that stood, by place behind the anchor.",
            labels=(*_LABELS, "position"),
        )
        for position, num_accepted in enumerate(stats.accepted_per_pos):
            family.add_metric((*self._labels, str(position)), num_accepted)
        yield family
        yield self._gauge("paceline:effective_k", "Longest draft of the last step.", stats.last_num_drafts)

    def _shards(self, stats: Stats) -> Iterator[Metric]:
        shards = [(str(shard.shard), shard) for shard in stats.shards]
        up = GaugeMetricFamily(
            "paceline:shard_up", "1 for the state a shard is in.", labels=(*_LABELS, "shard", "state")
        )
        for index, shard in shards:
            for state in get_args(ShardState):
                up.add_metric((*self._labels, index, state), state == shard.state)
        yield up
        for name, text, values in (
            ("context_tokens", "Tokens of context.", [(i, s.num_context_tokens) for i, s in shards]),
            ("context_sequences", "Sequences with context.", [(i, s.num_sequences) for i, s in shards]),
            ("context_pages", "Pages for context.", [(i, s.num_pages) for i, s in shards]),
            ("context_free_pages", "Pages no context holds.", [(i, s.num_free_pages) for i, s in shards]),
        ):
            gauge = GaugeMetricFamily(f"paceline:{name}", text, labels=(*_LABELS, "shard"))
            yield self._by_shard(gauge, values)
        for name, text, values in (
            ("failed_drafts", "Proposals that failed.", [(i, s.num_failed_drafts) for i, s in shards]),
            ("shard_commit_seconds", "Time it committed.", [(i, s.commit_s) for i, s in shards]),
            ("shard_draft_seconds", "Time it drafted.", [(i, s.draft_s) for i, s in shards]),
        ):
            counter = CounterMetricFamily(f"paceline:{name}", text, labels=(*_LABELS, "shard"))
            yield self._by_shard(counter, values)

    def _by_shard(
        self, family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]
    ) -> Metric:
        for index, value in values:
            family.add_metric((*self._labels, index), value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=_LABELS)
        counter.add_metric(self._labels, value)
        return counter
