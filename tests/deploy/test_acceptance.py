"""What is told of the drafts of one stream."""

import pytest

from paceline.deploy.acceptance import Acceptance


def taken(*steps: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for num_drafts, num_accepted in steps:
        acceptance.add(num_drafts, num_accepted)
    return acceptance


def test_a_slot_counts_only_where_it_was_drafted() -> None:
    acceptance = taken((3, 3), (0, 0), (3, 1), (1, 1), (2, 0))
    assert acceptance.per_slot() == pytest.approx([3 / 4, 1 / 3, 1 / 2])


def test_the_parts_of_a_report_agree() -> None:
    steps = [(7, 7), (7, 0), (0, 0), (7, 3), (4, 4), (1, 0)]
    report = taken(*steps).report(is_detailed=True)
    histogram = report["acceptance_histogram"]
    assert len(histogram) == report["num_spec_tokens"] + 1 == 8
    assert sum(histogram) == report["num_spec_steps"] == len(report["per_step_drafted"]) == 5
    assert (
        sum(num * count for num, count in enumerate(histogram)) == report["num_accepted_draft_tokens"] == 14
    )
    assert sum(report["per_step_drafted"]) == report["num_draft_tokens"] == 26
    assert report["mean_acceptance_length"] == pytest.approx(1 + 14 / 5)
    assert report["draft_acceptance_rate"] == pytest.approx(14 / 26)


def test_nothing_drafted_is_a_report_of_zeros() -> None:
    acceptance = taken((0, 0), (0, 0))
    assert acceptance.per_slot() == []
    assert acceptance.report(is_detailed=True) == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [0],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
        "num_spec_tokens": 0,
        "per_step_accepted": [],
        "per_step_drafted": [],
    }
