"""Deciding is cheap beside a step; the bounds are generous because test machines are shared."""

from statistics import median

import pytest

from paceline.deploy.bench.planning import PlanningCase, step_times_s


@pytest.mark.parametrize(
    ("case", "aim_s"),
    [
        (PlanningCase(), 1e-3),
        (PlanningCase(num_drafts=7, num_accepted=3), 2e-3),
        (PlanningCase(num_drafts=7, num_accepted=3, has_budget=True), 3e-3),
    ],
)
def test_planning_for_256_sequences_takes_little_time(case: PlanningCase, aim_s: float) -> None:
    """Settle and plan 256 decoding sequences: the bound is three times the aim."""
    assert median(step_times_s(256, 40, case)) < 3 * aim_s
