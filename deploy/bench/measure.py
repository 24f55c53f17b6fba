"""From streams to figures: what one load of one server adds up to."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import msgspec

from .client import Timing
from .counters import StepCounters
from .load import Load


class Objective(msgspec.Struct, frozen=True, kw_only=True):
    """What a client would call good service; None: does not care. A request meets all of it or none."""

    ttft_s: float | None = None
    itl_s: float | None = None  # the 99th percentile of its own gaps between events
    e2e_s: float | None = None

    def is_met(self, timing: Timing) -> bool:
        times_s = timing.times_s
        return (
            (self.ttft_s is None or times_s[0] <= self.ttft_s)
            and (self.itl_s is None or quantile(gaps_of(timing), 0.99) <= self.itl_s)
            and (self.e2e_s is None or times_s[-1] <= self.e2e_s)
        )


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One load. Quantiles are over its requests (gaps: over all their events).

    TTFT is the time to a request's first event, TPOT the mean time per token after it, a gap the time between
    two events, e2e the time to the last. Goodput counts the requests per second that met the objective.
    """

    load: Load
    num_requests: int
    wall_s: float
    tokens_per_s: float
    ttft_p50_s: float
    tpot_p50_s: float
    gap_p99_s: float
    gap_p50_s: float = 0.0
    ttft_p99_s: float = 0.0
    tpot_p99_s: float = 0.0
    e2e_p50_s: float = 0.0
    e2e_p99_s: float = 0.0
    goodput_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    counters: StepCounters | None = None

    @property
    def concurrency(self) -> int:
        return self.load.concurrency


def summarise(
    timings: Sequence[Timing],
    load: Load,
    wall_s: float,
    counters: StepCounters | None = None,
    objective: Objective | None = None,
) -> Measurement:
    """Reduce one load of `wall_s` seconds to its row of the report."""
    gaps = [gap for timing in timings for gap in gaps_of(timing)]
    ttfts = [t.times_s[0] for t in timings]
    tpots = [(t.times_s[-1] - t.times_s[0]) / max(t.num_tokens - 1, 1) for t in timings]
    e2es = [t.times_s[-1] for t in timings]
    return Measurement(
        load=load,
        num_requests=len(timings),
        wall_s=wall_s,
        tokens_per_s=sum(t.num_tokens for t in timings) / wall_s,
        prompt_tokens_per_s=sum(t.prompt_len for t in timings) / wall_s,
        ttft_p50_s=median(ttfts),
        ttft_p99_s=quantile(ttfts, 0.99),
        tpot_p50_s=median(tpots),
        tpot_p99_s=quantile(tpots, 0.99),
        gap_p50_s=quantile(gaps, 0.5),
        gap_p99_s=quantile(gaps, 0.99),
        e2e_p50_s=median(e2es),
        e2e_p99_s=quantile(e2es, 0.99),
        goodput_per_s=sum((objective or Objective()).is_met(t) for t in timings) / wall_s,
        counters=counters,
    )


def gaps_of(timing: Timing) -> list[float]:
    """Seconds between the events of one stream."""
    return [later - earlier for earlier, later in pairwise(timing.times_s)]


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which about this share of them is; 0 of none."""
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0
