"""The scheduler's heartbeats as Prometheus families: vLLM's names, and ours under `paceline:`."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..cluster.messages import BudgetMode, ShardState, Stats

LABELS = ("model_name", "engine")


class EngineNumbers(Collector):
    """The scheduler's latest heartbeat as gauges, counters and histograms.

    Its counters start again with each epoch of the engine, which Prometheus takes for a reset of any counter.
    """

    def __init__(
        self,
        labels: tuple[str, str],
        stats: Callable[[], Stats],
        num_rebuilds: Callable[[], int],
        cache_config: dict[str, str],
    ) -> None:
        self._labels = labels
        self._stats = stats
        self._num_rebuilds = num_rebuilds
        self._cache_config = cache_config

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._counter("paceline:rebuilds", "Times the engine was lost.", self._num_rebuilds())
        yield from self._steps(stats)
        yield from self._tokens(stats)
        yield from self._drafting(stats)
        yield from self._budget(stats)
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
            ("vllm:num_preemptions", "Times a request lost its pages.", stats.num_preemptions),
            ("vllm:corrupted_requests", "Requests ended by a non-finite logit.", stats.num_corrupted),
            ("paceline:steps", "Steps.", stats.num_steps),
            ("paceline:step_plan_seconds", "Time spent deciding.", stats.plan_s),
            ("paceline:step_wait_seconds", "Time from plan sent to last result.", stats.wait_s),
            ("paceline:step_compute_seconds", "Time rank 0 computed.", stats.compute_s),
            ("paceline:ignored_messages", "Messages of no use any more.", stats.num_ignored_messages),
        ):
            yield self._counter(name, text, value)
        why = "Requests in the queue, by what they wait for."
        by_reason = {"capacity": stats.num_waiting, "deferred": 0}
        yield self._by(GaugeMetricFamily, "vllm:num_requests_waiting_by_reason", why, "reason", by_reason)
        why = "Requests refused at the door."
        by_reason = {"max_num_queued_reqs": stats.num_rejected}
        yield self._by(CounterMetricFamily, "vllm:admission_rejections", why, "reason", by_reason)
        sizes = [float(2**place) for place in range(len(stats.steps_by_rows))]
        yield self._histogram(
            "vllm:iteration_tokens_total", "Rows of a step.", sizes, stats.steps_by_rows, stats.num_rows
        )
        keys = {**self._cache_config, "num_gpu_blocks": str(stats.num_pages)}
        info = GaugeMetricFamily("vllm:cache_config_info", "How K/V is kept.", labels=(*LABELS, *keys))
        info.add_metric((*self._labels, *keys.values()), 1)
        yield info

    def _tokens(self, stats: Stats) -> Iterator[Metric]:
        num_cached = stats.num_prefix_hits
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens.", stats.num_prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", num_cached),
            ("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_prefix_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", num_cached),
        ):
            yield self._counter(name, text, value)
        sources = {
            "local_compute": max(0, stats.num_prompt_tokens - num_cached),
            "local_cache_hit": num_cached,
        }
        text = "Prompt tokens, by where their K/V came from."
        yield self._by(CounterMetricFamily, "vllm:prompt_tokens_by_source", text, "source", sources)
        text = "Prompt tokens found in a cache, by its place."
        cached = {"device": num_cached}
        yield self._by(CounterMetricFamily, "vllm:prompt_tokens_cached_by_source", text, "source", cached)

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
            ("paceline:proposed_tokens", "Drafted tokens that the shards sent.", stats.num_proposed_tokens),
            ("paceline:verify_steps", "Steps that verified drafts.", stats.num_verify_steps),
            ("paceline:verify_seconds", "Time rank 0 computed steps with drafts.", stats.verify_s),
            ("paceline:late_drafts", "Drafts that came too late to be used.", stats.num_late_drafts),
        ):
            yield self._counter(name, text, value)
        name, text = (
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that stood, by place behind the anchor.",
        )
        by_position = {str(position): count for position, count in enumerate(stats.accepted_per_pos)}
        yield self._by(CounterMetricFamily, name, text, "position", by_position)
        lens = [float(num_drafts) for num_drafts in range(len(stats.blocks_by_len))]
        yield self._histogram(
            "paceline:block_drafts", "Drafts of a block.", lens, stats.blocks_by_len, stats.num_draft_tokens
        )
        yield self._gauge("paceline:effective_k", "Longest draft of the last step.", stats.last_num_drafts)

    def _budget(self, stats: Stats) -> Iterator[Metric]:
        choices = {
            "propose": stats.num_propose_choices,
            "commit": stats.num_commit_choices,
            "rest": stats.num_rest_choices,
        }
        text = "What the shards were asked for after a step."
        yield self._by(CounterMetricFamily, "paceline:budget_choices", text, "choice", choices)
        modes = {mode: mode == stats.budget_mode for mode in get_args(BudgetMode)}
        text = "1 for where the draft budget stands."
        yield self._by(GaugeMetricFamily, "paceline:budget_mode", text, "mode", modes)

    def _shards(self, stats: Stats) -> Iterator[Metric]:
        shards = [(str(shard.shard), shard) for shard in stats.shards]
        up = GaugeMetricFamily(
            "paceline:shard_up", "1 for the state a shard is in.", labels=(*LABELS, "shard", "state")
        )
        for index, shard in shards:
            for state in get_args(ShardState):
                up.add_metric((*self._labels, index, state), state == shard.state)
        yield up
        for name, text, values in (
            ("context_tokens", "Tokens of context.", {i: s.num_context_tokens for i, s in shards}),
            ("context_sequences", "Sequences with context.", {i: s.num_sequences for i, s in shards}),
            ("context_pages", "Pages for context.", {i: s.num_pages for i, s in shards}),
            ("context_free_pages", "Pages no context holds.", {i: s.num_free_pages for i, s in shards}),
        ):
            yield self._by(GaugeMetricFamily, f"paceline:{name}", text, "shard", values)
        for name, text, values in (
            ("failed_drafts", "Proposals that failed.", {i: s.num_failed_drafts for i, s in shards}),
            ("shard_commit_seconds", "Time it committed.", {i: s.commit_s for i, s in shards}),
            ("shard_draft_seconds", "Time it drafted.", {i: s.draft_s for i, s in shards}),
        ):
            yield self._by(CounterMetricFamily, f"paceline:{name}", text, "shard", values)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=LABELS)
        gauge.add_metric(self._labels, value)
        return gauge

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, text, labels=LABELS)
        counter.add_metric(self._labels, value)
        return counter

    def _by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """A family with one more label."""
        family = kind(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family

    def _histogram(
        self, name: str, text: str, bounds: Sequence[float], counts: Sequence[int], total: float
    ) -> Metric:
        return _histogram(name, text, self._labels, bounds, [*counts, 0], total)


class LeanHistogram(Collector):
    """A histogram that is cheap to observe, for what happens at every token. It belongs to one thread."""

    def __init__(self, name: str, text: str, labels: tuple[str, str], bounds: Sequence[float]) -> None:
        self._about = name, text, labels
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def collect(self) -> Iterator[Metric]:
        yield _histogram(*self._about, self._bounds, self._counts, self._total)


def _histogram(
    name: str,
    text: str,
    labels: tuple[str, str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """`counts` are those of each bucket alone, the last one's above every bound."""
    family = HistogramMetricFamily(name, text, labels=LABELS)
    edges = [*map(floatToGoString, bounds), "+Inf"]
    sums = map(float, accumulate(counts))
    family.add_metric(labels, list(zip(edges, sums, strict=True)), sum_value=total)
    return family
