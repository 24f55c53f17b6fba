"""What a rank tells of its steps before it is ready."""

from pathlib import Path

import pytest
from drive import make_config
from tiny import make_checkpoint

from paceline.workers.runner import Runner


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({"drafter": "ngram"}, {1, 8, 32}), ({"drafter": "none"}, set()), ({"itl_target_ms": 50.0}, {1, 8, 32})],
)
def test_a_rank_measures_some_steps_if_costs_matter(
    tmp_path: Path, options: dict[str, str | float], sizes: set[int]
) -> None:
    runner = Runner(make_checkpoint(tmp_path / "tiny", "llama"), make_config(**options))
    assert {num_rows for num_rows, _ in runner.step_costs} == sizes
    assert all(cost_ms > 0 for _, cost_ms in runner.step_costs)
    assert len(runner.step_costs) == 3 * len(sizes)
