"""Ranks stay together, rank 0 beside the server, and share out the cores."""

import pytest

from paceline.cluster.topology import order_ranks, placement_strategy, threads_per_rank


def test_ranks_follow_bundles_on_one_node() -> None:
    assert order_ranks({1: "a", 2: "a", 3: "a"}, "a") == [1, 2, 3]


def test_the_first_nodes_bundles_come_first_and_nodes_are_not_mixed() -> None:
    assert order_ranks({1: "b", 2: "a", 3: "c", 4: "b", 5: "a"}, "a") == [2, 5, 1, 4, 3]


def test_without_a_rank_on_the_first_node_the_lowest_bundle_leads() -> None:
    assert order_ranks({1: "c", 2: "b", 3: "c"}, "head") == [1, 3, 2]


@pytest.mark.parametrize(
    ("num_cores", "num_ranks", "configured", "expected"), [(8, 2, None, 4), (2, 4, None, 1), (8, 2, 3, 3)]
)
def test_threads(num_cores: int, num_ranks: int, configured: int | None, expected: int) -> None:
    assert threads_per_rank(num_cores, num_ranks, configured) == expected


def test_a_group_is_packed_strictly_only_where_a_node_can_hold_it() -> None:
    assert placement_strategy(8, 8) == "STRICT_PACK"
    assert placement_strategy(16, 8) == "PACK"
