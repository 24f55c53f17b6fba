"""Deciding is cheap beside a step; the bound is generous because test machines are shared."""

from statistics import median

from bench_scheduler import step_times_s


def test_planning_for_256_sequences_takes_little_time() -> None:
    """Settle and plan 256 decoding sequences: the aim is below 1 ms, the bound three times that."""
    assert median(step_times_s(256, 60)) < 3e-3
